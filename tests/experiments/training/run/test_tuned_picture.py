from dataclasses import replace

import pytest

from autotune.decisions.file import DecisionFile, End
from experiments.output.plots import save_figure
from experiments.training.run.tuned.picture import draw_tuning, missed_predictions, tuning_series
from tests.autotune.decisions.test_file import SECOND, START, THIRD, decision, header, window
from tests.experiments.runs import FAST, trained, write_text

ROWS = [
    {"step": n, "seconds": 0.01 * n, "stall_seconds": 0.002 * n, "skipped": False}
    for n in range(1, 21)
]


def decided(*windows):
    return DecisionFile(
        header=header(),
        decisions=(decision(5, START, SECOND), decision(12, SECOND, THIRD, by="zen-auto")),
        windows=windows,
        end=End(step=20, num_decisions=2, search_seconds=0.0, run_seconds=1.0),
    )


def windows():
    return (
        window(4, step_seconds=0.03, predicted_step_seconds=0.02),
        window(9, step_seconds=0.08, predicted_step_seconds=0.1),
        window(16, step_seconds=0.15),
    )


def test_knobs_hold_from_the_step_after_a_decision():
    series = tuning_series(decided(), ROWS)
    assert series.knobs == [(1, START), (6, SECOND), (13, THIRD)]
    assert series.decisions == [(5, "twin"), (12, "zen-auto")]


def test_windows_begin_behind_one_another_and_behind_decisions():
    stretches = tuning_series(decided(*windows()), ROWS).stretches
    assert [(item.first, item.last) for item in stretches] == [(1, 4), (6, 9), (13, 16)]
    assert [item.error for item in stretches] == [
        pytest.approx(0.02 / 0.03 - 1), pytest.approx(0.25), None,
    ]  # fmt: skip


def test_without_windows_step_time_is_measured_between_decisions():
    stretches = tuning_series(decided(), ROWS).stretches
    assert [(item.first, item.last) for item in stretches] == [(1, 5), (6, 12), (13, 20)]
    assert stretches[1].step_seconds == pytest.approx(0.09)
    assert {item.error for item in stretches} == {None}


def test_a_decision_behind_the_last_step_has_no_stretch():
    found = replace(decided(), decisions=(decision(20, START, SECOND),))
    series = tuning_series(found, ROWS)
    assert [(item.first, item.last) for item in series.stretches] == [(1, 20)]
    draw_tuning(series)


def test_skipped_steps_are_not_counted():
    rows = [{**ROWS[0], "skipped": True}, *ROWS]
    assert tuning_series(decided(), rows).seconds == tuning_series(decided(), ROWS).seconds


def test_stalled_shares_are_of_seconds_and_cover_every_step():
    series = tuning_series(decided(), ROWS)
    assert [step for step, _ in series.stalled] == list(range(1, 21))
    assert {round(share, 9) for _, share in series.stalled} == {0.2}
    many = [{**ROWS[0], "stall_seconds": 0.01 * (n % 2)} for n in range(1000)]
    points = tuning_series(decided(), many).stalled
    assert len(points) <= 120
    assert points[0][0] == 5
    assert points[0][1] == pytest.approx(4 / 9)


def test_the_picture_shows_decisions_measurement_and_prediction():
    series = tuning_series(decided(*windows()), ROWS)
    held, ratio, seconds, errors, stalled = draw_tuning(series).axes
    drawn = held.get_lines()[0]
    assert list(drawn.get_xdata()) == [0.5, 5.5, 12.5, 20.5]
    assert list(drawn.get_ydata()) == [4, 8, 8, 8]
    assert list(ratio.get_lines()[0].get_ydata()) == [0.1, 0.1, 0.2, 0.2]
    labels = [text.get_text() for text in seconds.get_legend().get_texts()]
    assert labels == ["each step", "measured", "predicted"]
    curve = next(line for line in errors.get_lines() if line.get_marker() == "o")
    assert list(curve.get_ydata()) == pytest.approx([100 * (0.02 / 0.03 - 1), 25])
    for axes in (held, ratio, seconds, errors, stalled):
        marks = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]
        assert sorted({line.get_xdata()[0] for line in marks}) == [5.5, 12.5]


def test_every_kind_of_run_can_be_drawn(tmp_path):
    untouched = replace(decided(), decisions=())
    for number, (found, rows) in enumerate(
        [(decided(*windows()), ROWS), (decided(), ROWS), (untouched, ROWS), (untouched, [])]
    ):
        save_figure(draw_tuning(tuning_series(found, rows)), tmp_path / f"{number}.png")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_tuned_run_leaves_its_picture(tmp_path, clock):
    text = write_text(tmp_path / "text.txt")
    out = trained(tmp_path / "run", *FAST, "--data", text, "--auto", "--steps", "6")
    assert (out / "tuning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        ({400: 1.3, 600: 1.4, 700: 0.2}, "from step 101 to 600: 1,300 to 1,400 ms"),
        ({200: 0.2, 400: 0.05, 600: 0.2}, "from step 201 to 400: 50 ms"),
        ({200: 0.2, 299: 1.3, 600: 0.25}, None),  # for less than a hundred steps
        ({200: None, 600: None}, None),
    ],
)
def test_predictions_that_are_far_off_for_long_are_told(predicted, words):
    found = [window(100, step_seconds=0.2, predicted_step_seconds=0.25)]
    found += [
        window(step, step_seconds=0.2, predicted_step_seconds=seconds)
        for step, seconds in predicted.items()
    ]
    rows = [{"step": n, "seconds": 0.2, "stall_seconds": 0.0} for n in range(1, 701)]
    series = tuning_series(replace(decided(*found), decisions=()), rows)
    said = missed_predictions(series)
    assert (said is None) == (words is None)
    if words is not None:
        assert words in said
        assert "200 measured" in said
