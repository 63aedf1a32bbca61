"""A sweep answers every point, and says what each row rests on."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from experiments.request.request import Request
from experiments.sweeps.axes.parsing import parse_axes
from experiments.sweeps.grid import Sweep
from experiments.sweeps.pictures.fronts import draw_pareto, front
from experiments.sweeps.pictures.plots import draw_sweep
from experiments.sweeps.points import rows_of
from experiments.sweeps.prices import add_prices, parse_prices
from experiments.sweeps.table import read_table
from tests.experiments.swept import BASE, CARD, GRID, all_rows, run, sweep_of, table_of_all


def test_points_found_together_are_as_points_found_alone():
    sweep = sweep_of(
        "model=qwen2.5-0.5b", "host=epyc-9654", "batch=4", "sequence=1024", "link_rate=4:64:x2",
        "duplex=1", "dram=400,800", "link.latency=1e-5,2e-3", knobs={"select_interval": 0},
    )  # fmt: skip
    together = all_rows(sweep)
    assert len({row["step_seconds"] for row in together.values()}) >= 4
    alone = {index: dict(rows_of(sweep, [index]))[index] for index in range(sweep.num_points)}
    assert together == alone


def test_a_point_is_what_simulate_says(tmp_path):
    words = ["--model", "qwen2.5-0.5b", "--gpu", "rtx4090", "--batch-size", "2"]
    done = run("sweep", *words, "--vary", "S=2,8", "--workers", "1", "--out", str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    table = read_table(tmp_path / "a")
    for interval in (2, 8):
        alone = json.loads(
            run("simulate", *words, "--update-interval", str(interval), "--json").output
        )
        row = table[table["S"] == interval].iloc[0]
        for name in ("step_seconds", "stall_seconds", "tokens_per_second", "selection_seconds"):
            assert row[name] == pytest.approx(alone[name], rel=1e-9), name
        assert row["device_bytes"] == alone["memory"]["device_bytes"]


def test_what_does_not_fit_or_go_together_is_a_row_with_a_reason():
    sweep = Sweep(
        axes=parse_axes(["model=tiny,llama-2-70b", "gpu=rtx4090,v100-pcie"]),
        request=Request(dtype="bfloat16"),
    )
    rows = all_rows(sweep)
    assert [rows[index]["status"] for index in range(4)] == [
        "ok", "invalid", "does not fit", "invalid",
    ]  # fmt: skip
    assert "v100-pcie has no peak for bfloat16" in rows[1]["reason"]
    assert "device memory: needs" in rows[2]["reason"]
    table = table_of_all(sweep)
    assert table["step_seconds"].notna().tolist() == [True, False, False, False]


def test_a_sweep_without_any_sense_is_refused_before_it_begins(tmp_path):
    for words, said in (
        (["--gpu", "rtx9999", "--vary", "S=1,2"], "rtx5090"),
        ([*CARD, "--vary", "S=0,9"], "integer >= 1"),
        ([*CARD, "--host", "epyc-7742", "--vary", "host=epyc-9654"], "given and varied"),
        ([*CARD, "--update-interval", "2", "--vary", "S=1,2"], "given and varied"),
        ([*CARD, "--vary", "gpu=h100"], "given and varied"),
        (["--machine", "dgx-a100-80", "--vary", "gpu=h100"], "leave one out"),
        (["--vary", "S=1,2"], "--gpu"),
        (CARD, "needs something to vary"),
        ([*CARD, *GRID, "--value", "step_secnds"], "step_seconds"),
        ([*CARD, *GRID, "--price", "rtx4091=3"], "rtx4090"),
        ([*CARD, *GRID, "--price", "rtx4090=free"], "price"),
        ([*CARD, "--vary", "dram=1:90000:1", "--vary", "d2h=1:90000:1"], "points"),
        ([*CARD, "--strategy", "superoffload", "--vary", "S=1,2"], "superoffload"),
        (["--study", "pcie5-or-cpu"], "`zenflow study whatif/NAME`"),
        (["--studies"], "`zenflow study whatif --list`"),
    ):
        done = run(*BASE, *words, "--out", str(tmp_path / "never"))
        assert done.exit_code == 2, (words, done.output)
        assert said in " ".join(done.output.split()), (words, done.output)
        assert not (tmp_path / "never").exists(), words
    assert run("sweep", *CARD, *GRID).exit_code == 2  # no model


def test_the_front_holds_what_nothing_beats():
    table = pd.DataFrame({"a": [1, 2, 3, 4, 2], "b": [9, 5, 6, 1, 5]})
    assert front(table, "a", "b")[["a", "b"]].to_numpy().tolist() == [[1, 9], [2, 5], [4, 1]]
    best = front(table.rename(columns={"b": "tokens_per_second"}), "a", "tokens_per_second")
    assert best["a"].tolist() == [1]


def test_lines_for_one_axis_a_map_for_two_and_panels_for_three():
    for axes, panels in (
        (("S=1,2,4",), 1),
        (("S=1,2", "dram=20,40"), 1),
        (("S=1,2,4", "dram=20,40,80", "strategy=zenflow,delayed"), 2),
    ):
        sweep = sweep_of(*axes)
        table = table_of_all(sweep)
        figure = draw_sweep(table, sweep.axes, "step_seconds")
        drawn = [own for own in figure.axes if own.axison and own.get_label() != "<colorbar>"]
        assert len(drawn) == panels
        assert bool(drawn[0].lines) == (len(axes) == 1)
        assert bool(drawn[0].images) == (len(axes) > 1)
        if len(axes) == 2:
            shown = drawn[0].images[0].get_array()
            first = table[(table["S"] == 1) & (table["dram"] == 20)]
            assert shown[0, 0] == first["step_seconds"].iloc[0]
    assert draw_pareto(table, sweep.axes, "step_seconds", ["staleness_steps"]) is not None
    assert draw_sweep(table, [], "step_seconds") is None


def test_a_sweep_that_was_broken_off_is_drawn_with_what_it_has():
    sweep = sweep_of("S=1,2", "dram=20,40")
    table = table_of_all(sweep).iloc[:3]
    figure = draw_sweep(table, sweep.axes, "step_seconds")
    FigureCanvasAgg(figure).draw()
    shown = next(own.images[0] for own in figure.axes if own.images).get_array()
    assert np.isfinite(np.ma.filled(shown, np.nan)).sum() == 3


def test_values_that_hardly_differ_are_painted_alike_on_a_scale_of_plain_numbers():
    sweep = sweep_of("S=1,2", "dram=20,40")
    table = table_of_all(sweep)
    for values, least_apart in (([2.0, 2.000002, 2.0, 2.0], 0.0), ([2.0, 4.0, 6.0, 8.0], 1.0)):
        figure = draw_sweep(table.assign(step_seconds=values), sweep.axes, "step_seconds")
        image = next(own.images[0] for own in figure.axes if own.images)
        shares = image.norm(image.get_array())
        assert float(shares.max() - shares.min()) == pytest.approx(least_apart, abs=0.01)
        bar = next(own for own in figure.axes if own.get_label() == "<colorbar>")
        FigureCanvasAgg(figure).draw()
        assert bar.yaxis.get_offset_text().get_text() == ""
        ticks = [float(text.get_text()) for text in bar.get_yticklabels()]
        assert len(set(ticks)) == len(ticks) > 1


def test_a_front_shows_the_value_asked_for_in_dollars_and_names_its_points():
    sweep = sweep_of("gpu=rtx4090,rtx5090", "batch=1,2")
    table = table_of_all(sweep)
    priced = add_prices(table, parse_prices(["rtx4090=1000", "rtx5090=2000"]))
    figure = draw_pareto(priced, sweep.axes, "tokens_per_second", ["price_usd"])
    panel = figure.axes[0]
    assert panel.get_ylabel() == "tokens_per_second"
    assert "USD" in panel.get_xlabel()
    marks = {text.get_text(): tuple(text.xy) for text in panel.texts}
    names = dict(text.get_text().split("  ", 1) for text in figure.legends[0].get_texts())
    assert sorted(names.values()) == sorted(
        f"{gpu}, batch={batch}" for gpu in ("rtx4090", "rtx5090") for batch in (1, 2)
    )
    for row in priced.to_dict("records"):
        name = f"{row['gpu']}, batch={row['batch']:g}"
        number = next(key for key, text in names.items() if text == name)
        assert marks[number] == (row["price_usd"], row["tokens_per_second"])


def test_prices_add_up_and_unpriced_parts_are_left_empty():
    sweep = sweep_of("gpu=rtx4090,rtx5090", "host=epyc-7742,epyc-9654")
    table = table_of_all(sweep)
    priced = add_prices(table, parse_prices(["RTX 4090=1000", "epyc-7742=500", "epyc-9654=900"]))
    values = list(priced["price_usd"])
    assert values[:2] == [1500, 1900]
    assert all(math.isnan(value) for value in values[2:])


def test_help_and_lists_are_quick():
    assert "--vary" in run("sweep", "--help").output
    listed = run("sweep", "--axes").output
    assert all(name in listed for name in ("gpu", "dram", "GB/s", "cores"))
