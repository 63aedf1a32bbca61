import io
import json
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from experiments.output import bar as bar_module
from experiments.output.outlook import Outlook, PlannedRun
from experiments.output.plots import draw_comparison, draw_timeline, last_steps
from experiments.output.progress import Reporter
from experiments.training.run.compared_runs import comparison, read_run, stall_removed, table
from experiments.training.run.comparison import run_comparison
from experiments.training.run.stop import StopRequest
from experiments.training.settings.comparison import COMPARED, START_SHARE
from experiments.training.settings.training import TrainSettings
from tests.experiments.runs import FAST, steps, summary, train, trained, write_text
from zenflow.trace.timeline import Span, Timeline


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    text = write_text(folder / "text.txt")
    flags = [*FAST, "--data", text, "--steps", "16", "--eval-every", "2"]
    result = train("--compare", "--out", folder / "runs", *flags)
    assert result.exit_code == 0, result.output
    return folder / "runs", result.output


def test_comparison_leaves_a_run_per_strategy_a_record_and_a_picture(compared):
    folder, output = compared
    record = json.loads((folder / "compare.json").read_text())
    assert list(record["runs"]) == list(COMPARED)
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    for strategy in COMPARED:
        assert summary(folder / strategy)["strategy"] == strategy
        assert strategy in output


def test_strategies_see_the_same_link_data_and_first_weights(compared):
    folder, output = compared
    links = [summary(folder / strategy)["emulated_link"] for strategy in COMPARED]
    assert links[0] is not None
    assert all(link == links[0] for link in links)
    first_losses = [steps(folder / strategy)[0]["loss"] for strategy in COMPARED]
    assert len(set(first_losses)) == 1
    assert "emulated link:" in output
    assert "(emulated link)" in output


def test_strategies_go_on_from_a_model_trained_on_the_device(compared, tmp_path, blank_pictures):
    folder, output = compared
    start = summary(folder / "start")
    assert start["strategy"] == "on_device"
    assert start["steps"] == round(START_SHARE * 16)
    assert "10 steps on the device, for weights to start from" in output
    begun = steps(folder / "on_device")[0]["loss"]
    assert begun < steps(folder / "start")[0]["loss"] - 0.1
    flags = [*FAST, "--data", folder.parent / "text.txt", "--steps", "3"]
    fresh = trained(tmp_path / "fresh", "--compare", *flags, "--start-steps", "0")
    assert not (fresh / "start").exists()
    assert steps(fresh / "zenflow")[0]["loss"] > begun + 0.1
    weights = f"own:{folder / 'start' / 'model'}"
    flags = [*flags[2:], "--model", weights]
    trained(tmp_path / "tuned", "--compare", *flags)
    assert not (tmp_path / "tuned" / "start").exists()  # these weights need no start
    assert steps(tmp_path / "tuned" / "zenflow")[0]["loss"] == pytest.approx(begun, rel=1e-5)


def test_an_interrupted_start_is_taken_up_again(compared, tmp_path, blank_pictures):
    folder, _ = compared
    settings = TrainSettings.from_dict(
        json.loads((folder / "config.json").read_text())["settings"]
    )

    class StopsAt3(Reporter):
        def step(self, row):
            if row["step"] == 3 and row["loss"] and not stop.requested:
                stop.signal = signal.SIGTERM

    stop = StopRequest()
    reporter = StopsAt3(Console(quiet=True))
    outcome = run_comparison(settings, tmp_path / "runs", reporter=reporter, stop=stop)
    assert outcome.stopped
    assert 3 <= outcome.steps < 10
    assert not (tmp_path / "runs" / "on_device").exists()
    stop, reporter = StopRequest(), Reporter(Console(quiet=True))
    run_comparison(settings, tmp_path / "runs", reporter=reporter, stop=stop, resume=True)
    for name in ("start", "zenflow"):
        ours, theirs = steps(tmp_path / "runs" / name), steps(folder / name)
        assert [row["loss"] for row in ours] == [row["loss"] for row in theirs]


def test_a_comparison_says_first_what_it_does_and_last_what_to_look_at(compared):
    folder, output = compared
    lines = output.splitlines()
    assert lines[0].startswith("To do: 10 steps on the device")
    assert all(name in lines[0] for name in (*COMPARED, "16 steps each"))
    assert lines[2].startswith("All of it takes ")
    shown = [line for line in lines if line[1:3] == "/5"]
    assert [line.split()[:2] for line in shown] == [
        [f"{number}/5", name] for number, name in enumerate(("start", *COMPARED), start=1)
    ]
    assert all("ms/step" in line and "stalled" in line for line in shown)
    assert all("all done in" in line for line in shown[:-1])
    assert str(folder / "compare.png") in lines[-2]
    assert "zenflow report" in lines[-2]


def test_a_terminal_sees_one_bar_over_all_runs(tmp_path, monkeypatch, blank_pictures):
    bars = []

    class Counted(bar_module.Progress):
        def __init__(self, *columns, **others):
            super().__init__(*columns, **others)
            bars.append(self)

    monkeypatch.setattr(bar_module, "Progress", Counted)
    text = write_text(tmp_path / "text.txt")
    settings = TrainSettings(
        model="own:tiny", batch_size=2, sequence=32, eval_batches=2, device="cpu",
        data=str(text), steps=4,
    ).for_comparison()  # fmt: skip
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    reporter = Reporter(console)
    run_comparison(settings, tmp_path / "runs", reporter=reporter, stop=StopRequest())
    (bar,) = bars
    (task,) = bar.tasks
    assert task.completed == task.total == 4 * len(COMPARED) + settings.start_steps
    assert "ms/step" in task.fields["text"]


def test_time_left_is_a_guess_first_and_then_what_steps_take():
    now = [100.0]
    runs = [PlannedRun("a", 10, 1.0), PlannedRun("b", 10, 3.0)]
    outlook = Outlook(runs, is_guessed=True, seconds_beside=1.0, clock=lambda: now[0])
    assert outlook.seconds_left() == pytest.approx(40 + 2)
    outlook.start(0)
    now[0] += 8.0
    outlook.step(4)  # twice as slow as guessed, and so will b be
    assert outlook.seconds_left() == pytest.approx(6 * 2 + 10 * 6)
    now[0] += 12.0
    outlook.step(10)
    outlook.start(2)  # resumed: what was done before took nothing now
    assert outlook.seconds_left() == pytest.approx(8 * 6)
    now[0] += 5 * 20.0  # its own pace is known now, and another
    outlook.step(7)
    assert outlook.seconds_left() == pytest.approx(3 * 20)
    assert (outlook.done, outlook.total, outlook.label) == (17, 20, "2/2 b")
    unknown = Outlook(runs, is_guessed=False, clock=lambda: now[0])
    assert unknown.seconds_left() is None
    unknown.start(0)
    now[0] += 10.0
    unknown.step(1)
    assert unknown.seconds_left() == pytest.approx(9 * 10 + 10 * 30)


def test_zero_offload_is_adamw_and_the_others_are_not(compared):
    folder, _ = compared
    losses = {s: [row["loss"] for row in steps(folder / s)] for s in COMPARED}
    assert losses["zero_offload"] == pytest.approx(losses["on_device"], rel=1e-5)
    assert losses["zenflow"] != pytest.approx(losses["on_device"], rel=1e-5)
    assert losses["zenflow"] != losses["zenflow_paper"]


def test_finished_strategies_are_kept_on_resume(compared, blank_pictures):
    folder, _ = compared
    before = (folder / "zenflow" / "steps.jsonl").stat().st_mtime_ns
    result = train("--resume", folder)
    assert result.exit_code == 0, result.output
    assert (folder / "zenflow" / "steps.jsonl").stat().st_mtime_ns == before
    assert "vs on_device" in " ".join(result.output.split()) or "zenflow:" in result.output


def test_stall_removed_compares_seconds_per_step():
    summaries = {
        "zero_offload": {"stall_seconds": 50.0, "steps": 100},
        "zenflow": {"stall_seconds": 5.0, "steps": 200},
    }
    assert stall_removed(summaries) == pytest.approx(0.95)


def test_figures_of_the_comparison_are_in_its_record(compared):
    folder, _ = compared
    runs = [read_run(folder / strategy) for strategy in COMPARED]
    found = comparison(runs)["zenflow"]
    eval_loss = {run.strategy: run.summary["eval_loss"] for run in runs}
    assert found["eval_loss_over_on_device"] == eval_loss["zenflow"] / eval_loss["on_device"]
    assert table(runs).row_count == len(COMPARED)
    assert "emulated" in str(table(runs).title)


def texts_of(figure) -> str:
    found = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return "\n".join(artist.get_text() for artist in found)


def test_pictures_say_that_the_link_is_emulated_and_only_then(compared, tmp_path):
    folder, _ = compared
    runs = [read_run(folder / strategy) for strategy in COMPARED]
    assert "emulated link" in texts_of(draw_comparison(runs, 4))
    run = runs[-1]
    assert "emulated link" in texts_of(draw_timeline(run.timeline, run.summary))
    real = {**run.summary, "emulated_link": None}
    assert "emulated" not in texts_of(draw_timeline(run.timeline, real))


def test_a_step_without_a_finite_loss_leaves_a_gap_in_the_picture(compared):
    """A loss scale that overflows leaves such rows; their loss is null in the file."""
    folder, _ = compared
    run = read_run(folder / "zenflow")
    rows = [{**row, "loss": None} if row["step"] in (1, 5) else row for row in run.rows]
    figure = draw_comparison([replace(run, rows=rows)], 4)
    panel = next(axes for axes in figure.axes if "held-out" in axes.get_ylabel())
    assert len(panel.lines[0].get_xdata()) == len(rows) - 2


def test_every_held_out_loss_is_inside_its_axis(compared):
    folder, _ = compared
    runs = [read_run(folder / strategy) for strategy in COMPARED]
    run = runs[-1]
    above = 1.5 * max(row["loss"] for row in run.rows)
    runs[-1] = replace(run, summary={**run.summary, "eval_loss": above})
    figure = draw_comparison(runs, 4)
    panels = [axes for axes in figure.axes if "held-out" in axes.get_ylabel()]
    assert len(panels) == 2
    for axes in panels:
        dotted = [line for line in axes.get_lines() if line.get_marker() == "o"]
        low, high = axes.get_ylim()
        shown = [loss for line in dotted for loss in line.get_ydata()]
        assert above in shown
        assert all(low < loss < high for loss in shown)


def test_last_steps_are_cut_where_the_device_starts_them():
    spans = [Span("device", "forward", float(n), n + 0.5, n) for n in range(1, 6)]
    spans.append(Span("host", "adam", 2.5, 4.5, 2))
    cut = last_steps(Timeline(tuple(spans)), 2)
    assert (cut.start, cut.end) == (4.0, 5.5)
    assert cut.busy("device") == 1.0
    assert cut.busy("host") == 0.5


def test_comparison_with_settings_of_one_strategy_only(tmp_path, blank_pictures):
    text = write_text(tmp_path / "a.txt")
    flags = ["--compare", *FAST, "--data", text, "--steps", "3", "--queue-depth", "2"]
    out = trained(tmp_path / "r", *flags)
    depths = {
        s: json.loads((out / s / "config.json").read_text())["config"]["queue_depth"]
        for s in COMPARED
    }
    assert depths == {**dict.fromkeys(COMPARED), "zenflow": 2}
