"""A sweep answers every point once, whatever interrupts it, and says what each row rests on."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.cli import main
from experiments.sweeps import pool
from experiments.sweeps.axes import KINDS, parse_axes, parse_axis
from experiments.sweeps.grid import TOLERANCE, Sweep
from experiments.sweeps.journal import NAME, Journal
from experiments.sweeps.plots import draw_pareto, draw_sweep, front
from experiments.sweeps.points import rows_of
from experiments.sweeps.pool import local_rows
from experiments.sweeps.prices import add_prices, parse_prices
from experiments.sweeps.run import Engine, run_sweep
from experiments.sweeps.table import CSV, PARQUET, read_table, table_of
from tests.experiments.deadly_sweep import DeadlySweep
from zenflow.errors import ConfigError, ZenFlowError

MODEL = {"model": "tiny", "batch_size": 2, "sequence": 128}
BASE = ["sweep", "--model", "tiny", "--batch-size", "2", "--sequence", "128"]
CARD = ["--gpu", "rtx4090"]
GRID = ["--vary", "S=1,2,4", "--vary", "dram=20:80:x2"]
PROCESSES = 2


def sweep_of(*axes, knobs=None, **more):
    flags = {**MODEL, "gpu": "rtx4090"}
    varied = parse_axes(axes)
    if "model" in {axis.name for axis in varied}:
        del flags["model"]
    if {"gpu", "machine"} & {axis.name for axis in varied}:
        del flags["gpu"]
    return Sweep(axes=varied, flags=flags, knobs=knobs or {}, **more)


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def all_rows(sweep):
    return dict(rows_of(sweep, range(sweep.num_points)))


# ---- axes -------------------------------------------------------------------------------------


@given(
    low=st.integers(1, 1000), step=st.integers(1, 50), count=st.integers(0, 60),
    over=st.integers(0, 49),
)  # fmt: skip
def test_a_range_holds_every_step_from_its_beginning_to_its_end(low, step, count, over):
    high = low + count * step + min(over, step - 1)
    values = parse_axis(f"cores={low}:{high}:{step}").values
    assert list(values) == list(range(low, high + 1, step))


@given(low=st.floats(1e-3, 1e3), factor=st.floats(1.01, 10), count=st.integers(0, 20))
@settings(deadline=None)
def test_a_factors_range_begins_at_lo_and_ends_at_hi(low, factor, count):
    low, factor = float(f"{low:.6g}"), float(f"{factor:.6g}")
    high = low * factor**count
    values = parse_axis(f"dram={low:.17g}:{high:.17g}:x{factor:.17g}").values
    assert len(values) == count + 1
    assert values[0] == pytest.approx(low)
    assert values[-1] == pytest.approx(high)
    for before, after in itertools.pairwise(values):
        assert after / before == pytest.approx(factor, rel=1e-9)


def test_decimals_are_what_they_are_written_as():
    assert parse_axis("k=0:0.3:0.1").values == (0.0, 0.1, 0.2, 0.3)
    assert parse_axis("S=1:10:x1.5").values == (1, 2, 3, 5, 8)
    assert parse_axis("lag=1,S,2,1").values == (1, "S", 2)


def test_names_are_spelt_as_the_table_spells_them():
    assert parse_axis("gpu=RTX 4090,a100").values == ("rtx4090", "a100-80-sxm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S", "write --vary"),
        ("hots=a", "nearest names are host"),
        ("s=1,2", "did you mean 'S'"),
        ("host=epic-7742", "epyc-7742"),
        ("link=25", "nearest|known are"),
        ("strategy=zenflw", "did you mean 'zenflow'"),
        ("S=0", "integer >= 1"),
        ("prediction=0,1", "nothing to vary"),
        ("S=1.5", "1.5"),
        ("k=1.5", "share"),
        ("dram=-5", "positive"),
        ("dram=nan", "positive"),
        ("cores=2.5", "whole"),
        ("checkpointing=perhaps", "yes or no"),
        ("dram=1:2", "lo:hi:step"),
        ("dram=2:1:1", "never ends"),
        ("dram=1:2:0", "never ends"),
        ("dram=1:2:x1", "never ends"),
        ("dram=0:2:x2", "never ends"),
        ("dram=1:1e9:1e-3", "more than"),
        ("model=llama2", "llama-2-7b"),
        ("deferred_moments=step,windo", "window"),
    ],
)
def test_a_wrong_axis_is_refused_with_its_remedy(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_axes([text])
    done = run(*BASE, *CARD, "--vary", text)
    assert done.exit_code == 2, done.output
    assert "Error" in done.output


@pytest.mark.parametrize("axes", [("S=1", "S=2"), ("k=0.1", "topk_ratio=0.2"),
                                  ("gpu=rtx4090", "machine=dgx-a100-80")])  # fmt: skip
def test_one_thing_is_varied_once(axes):
    with pytest.raises(ConfigError, match=r"same|one of them"):
        parse_axes(axes)


def test_every_axis_moves_the_machine_or_the_work():
    values = {
        "model": "mini", "gpu": "h100", "machine": "dgx-a100-40", "host": "epyc-9654",
        "link": "pcie3-x16", "fabric": "nvlink3", "nvme": "none", "dtype": "float32",
        "checkpointing": "yes", "strategy": "zero_offload", "k": "0.3", "topk_ratio": "0.3",
        "S": "8", "update_interval": "8", "lag": "S", "rolling": "no", "overlap_step": "no",
        "deferred_moments": "window", "select_interval": "7", "min_split_elements": "5000",
        "block_elements": "4096",
        "duplex": "0.5",
    }  # fmt: skip
    plain = Sweep(axes=(), flags={**MODEL, "gpu": "l40s"})
    before = plain.case(0)
    for name in KINDS:
        if name in ("num_gpus", "fabric"):
            continue  # these need several devices
        varied = parse_axes([f"{name}={values.get(name, '6')}"])
        flags = {**MODEL, **({} if name in ("gpu", "machine") else {"gpu": "l40s"})}
        if name == "model":
            del flags["model"]
        after = Sweep(axes=varied, flags=flags).case(0)
        assert after != before, name


def test_the_grid_names_every_combination_once():
    sweep = sweep_of("S=1,2", "dram=20,40,80", "strategy=zenflow,zero_offload")
    seen = {tuple(sweep.values(index).items()) for index in range(sweep.num_points)}
    assert len(seen) == sweep.num_points == 12
    assert sweep.values(1) == {"S": 1, "dram": 20.0, "strategy": "zero_offload"}


# ---- points -----------------------------------------------------------------------------------


def test_a_closed_form_says_what_events_say_where_both_answer():
    axes = (
        "model=qwen2.5-0.5b", "host=epyc-9654", "batch=4", "sequence=1024", "S=1,4", "d2h=12,30",
        "h2d=9,50", "duplex=1", "dram=100,800", "strategy=zenflow,published_zero_offload",
    )  # fmt: skip
    whole = {name: sweep_of(*axes, knobs={"select_interval": 0}, method=name, tolerance=0.0)
             for name in ("closed-form", "simulate")}  # fmt: skip
    formula, events = (all_rows(sweep) for sweep in whole.values())
    assert {row["method"] for row in events.values()} == {"simulated"}
    both = [index for index, row in formula.items() if row["status"] == "ok"]
    assert len({formula[index]["step_seconds"] for index in both}) >= 5
    for index in both:
        assert formula[index]["method"] == "closed form"
        for name in ("step_seconds", "stall_seconds"):
            assert formula[index][name] == pytest.approx(
                events[index][name], rel=1e-5, abs=1e-6 * events[index]["step_seconds"]
            )
    others = [row for row in formula.values() if row["status"] != "ok"]
    assert all(row["status"] == "no formula" and "simulate" in row["reason"] for row in others)


def test_a_closed_form_is_as_near_as_its_tolerance_says():
    axes = (
        "model=qwen2.5-0.5b", "host=epyc-9654", "batch=4", "sequence=1024", "S=2,4",
        "link_rate=20:80:x2", "duplex=0.6,0.75",
    )  # fmt: skip
    knobs = {"select_interval": 0}
    near = all_rows(sweep_of(*axes, knobs=knobs))
    events = all_rows(sweep_of(*axes, knobs=knobs, method="simulate"))
    found = [index for index, row in near.items() if row["method"] == "closed form"]
    assert len(found) >= 3
    for index in found:
        assert near[index]["step_seconds"] == pytest.approx(
            events[index]["step_seconds"], rel=TOLERANCE
        )


def test_points_solved_together_are_as_points_solved_alone():
    sweep = sweep_of(
        "model=qwen2.5-0.5b", "host=epyc-9654", "batch=4", "sequence=1024", "link_rate=4:64:x2",
        "duplex=1", "dram=400,800", "link.latency=1e-5,2e-3", knobs={"select_interval": 0},
    )  # fmt: skip
    together = all_rows(sweep)
    solved = [row for row in together.values() if row["method"] == "closed form"]
    assert len({row["step_seconds"] for row in solved}) >= 4
    alone = {index: dict(rows_of(sweep, [index]))[index] for index in range(sweep.num_points)}
    assert together == alone


def test_selections_that_recur_have_no_formula():
    rows = all_rows(sweep_of("link_rate=64", "duplex=1", method="closed-form"))
    assert rows[0]["status"] == "no formula"
    assert "--select-interval 0" in rows[0]["reason"]


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
    sweep = Sweep(axes=parse_axes(["model=tiny,llama-2-70b", "lag=1,8"]), flags={"gpu": "rtx4090"})
    rows = all_rows(sweep)
    assert [rows[index]["status"] for index in range(4)] == [
        "ok", "invalid", "does not fit", "invalid",
    ]  # fmt: skip
    assert "lag" in rows[1]["reason"]
    assert "device memory: needs" in rows[2]["reason"]
    table = table_of(sweep, rows)
    assert table["step_seconds"].notna().tolist() == [True, False, False, False]


def test_a_sweep_without_any_sense_is_refused_before_it_begins(tmp_path):
    for words, said in (
        (["--gpu", "rtx9999", "--vary", "S=1,2"], "rtx5090"),
        ([*CARD, "--vary", "lag=8,9"], "lag"),
        ([*CARD, "--host", "epyc-7742", "--vary", "host=epyc-9654"], "given and varied"),
        ([*CARD, "--update-interval", "2", "--vary", "S=1,2"], "given and varied"),
        ([*CARD, "--vary", "gpu=h100"], "given and varied"),
        (["--machine", "dgx-a100-80", "--vary", "gpu=h100"], "leave one out"),
        (["--vary", "S=1,2"], "--gpu"),
        (CARD, "needs something to vary"),
        ([*CARD, *GRID, "--value", "step_secnds"], "step_seconds"),
        ([*CARD, *GRID, "--price", "rtx4091=3"], "rtx4090"),
        ([*CARD, *GRID, "--price", "rtx4090=free"], "price"),
        ([*CARD, *GRID, "--tolerance", "-1"], "tolerance"),
        ([*CARD, *GRID, "--scheduler", "tcp://here:1"], "--engine dask"),
        ([*CARD, "--vary", "dram=1:90000:1", "--vary", "d2h=1:90000:1"], "points"),
        ([*CARD, "--strategy", "superoffload", "--vary", "S=1,2"], "superoffload"),
        (["--study", "pcie5-or-cpu", "--vary", "S=1"], "leave out"),
        (["--study", "pcie5"], "pcie5-or-cpu"),
    ):
        rest = BASE if "--study" not in words else ["sweep"]
        done = run(*rest, *words, "--out", str(tmp_path / "never"))
        assert done.exit_code == 2, (words, done.output)
        assert said in " ".join(done.output.split()), (words, done.output)
        assert not (tmp_path / "never").exists(), words
    assert run("sweep", *CARD, *GRID).exit_code == 2  # no model


# ---- tables, and going on ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = run(*BASE, *CARD, *GRID, "--workers", "1", "--out", str(folder))
    assert done.exit_code == 0, done.output
    return folder


def test_the_table_has_every_point_in_order_and_where_it_comes_from(whole):
    table = pd.read_csv(whole / CSV)
    assert list(table["S"]) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert list(table["dram"]) == [20, 40, 80] * 3
    assert (table["status"] == "ok").all()
    parquet = pd.read_parquet(whole / PARQUET)
    own = read_table(whole)
    pd.testing.assert_frame_equal(parquet, own, check_dtype=False)
    origin = json.loads((whole / "provenance.json").read_text())
    assert origin["sweep"]["axes"] == {"S": [1, 2, 4], "dram": [20.0, 40.0, 80.0]}
    assert origin["finished"] == origin["num_points"] == 9
    assert set(table.columns) == origin["columns"].keys()
    assert origin["sessions"][0]["hardware"]["cpu"]
    assert "nothing here was measured" in origin["kind"]
    assert "assumed as in rtx4090-desktop: host, link, drives" in origin["assumed"]
    assert {"picture.png", "pareto.png"} <= {file.name for file in whole.iterdir()}
    assert not [file for file in whole.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("cut", [0, 40, -1, -30, -700])
def test_a_torn_sweep_goes_on_to_the_same_table(whole, tmp_path, cut):
    journal = (whole / NAME).read_bytes()
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / NAME).write_bytes(journal[: cut or None] if cut else b"")
    for _ in range(2):  # and once more, with nothing left to do
        outcome = run_sweep(sweep_of("S=1,2,4", "dram=20:80:x2"), folder, Engine(workers=1))
        assert outcome.exit_code == 0
        assert (folder / CSV).read_bytes() == (whole / CSV).read_bytes()
    points = [json.loads(line).get("point") for line in (folder / NAME).read_bytes().splitlines()]
    found = [point for point in points if point is not None]
    assert sorted(found) == list(range(9))


def test_another_sweep_or_another_file_in_the_folder_is_refused(whole, tmp_path):
    before = (whole / NAME).read_bytes()
    other = run(*BASE, *CARD, "--vary", "S=1,2,4", "--vary", "dram=20,40", "--out", str(whole))
    assert other.exit_code == 2
    assert "dram (20.0, 40.0, 80.0, now 20.0, 40.0)" in " ".join(other.output.split())
    turned = run(*BASE, *CARD, *GRID[2:], *GRID[:2], "--out", str(whole))
    assert "order of its axes" in " ".join(turned.output.split())
    assert (whole / NAME).read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    strange = run(*BASE, *CARD, *GRID, "--out", str(tmp_path))
    assert strange.exit_code == 2
    assert "must be new" in strange.output


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    sweep = sweep_of("S=1,2").to_dict()
    with (
        Journal(tmp_path / "a", sweep).open({}),
        pytest.raises(ConfigError, match="another sweep is at work"),
    ):
        Journal(tmp_path / "a", sweep).open({})


def test_a_killed_worker_loses_no_point(tmp_path):
    sweep = sweep_of("S=1,2,4", "dram=20:400:10", "strategy=zenflow,superoffload")
    killed = []
    rows = {}
    for index, row in local_rows(sweep, range(sweep.num_points), PROCESSES, lambda: False):
        assert index not in rows
        rows[index] = row
        if len(rows) in (5, 60):
            children = _children()
            os.kill(children[0], signal.SIGKILL)
            killed.append(children[0])
    assert len(set(killed)) == 2
    expected = sweep_of("S=1,2,4", "dram=20:400:10", "strategy=zenflow,superoffload")
    assert rows == all_rows(expected)
    assert not _children()


def _children():
    import psutil

    found = psutil.Process().children()
    return [
        child.pid for child in found
        if any("spawn_main" in word for word in child.cmdline())
    ]  # fmt: skip


def test_a_point_that_kills_its_workers_is_reported_and_tried_again_later(tmp_path, monkeypatch):
    sweep = sweep_of("S=1,2,4")
    deadly = DeadlySweep(**{name: getattr(sweep, name) for name in Sweep.__dataclass_fields__})
    monkeypatch.setattr(pool, "MOST_TRIES", 2)
    rows = dict(local_rows(deadly, range(3), PROCESSES, lambda: False))
    assert [rows[index]["status"] for index in range(3)] == ["ok", "failed", "ok"]
    monkeypatch.setattr(pool, "_MOST_LOST", 0)
    with pytest.raises(ZenFlowError, match="have died"):
        list(local_rows(deadly, range(3), PROCESSES, lambda: False))
    journal = Journal(tmp_path / "a", sweep.to_dict())
    with journal.open({}):
        for index, row in rows.items():
            journal.add(index, row)
    assert sorted(Journal(tmp_path / "a", sweep.to_dict()).rows) == [0, 2]


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path):
    words = [*BASE, *CARD, "--vary", "S=1,2,4", "--vary", "dram=20:520:0.5", "--method",
             "simulate", "--workers", str(PROCESSES), "--out", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    journal = tmp_path / "out" / NAME
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 20):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "are kept: the same command" in " ".join(output.split())
    assert "Traceback" not in output
    kept = len(Journal(tmp_path / "out", _sweep_in(journal)).rows)
    assert 20 <= kept < 3003
    assert len(pd.read_csv(tmp_path / "out" / CSV)) == kept


def _sweep_in(journal):
    return json.loads(journal.read_bytes().splitlines()[0])["sweep"]


def test_dask_answers_as_processes_do(tmp_path):
    pytest.importorskip("distributed")
    sweep = sweep_of("S=1,2,4", "dram=20,40,80", "gpu=rtx4090,h100")
    expected = table_of(sweep, all_rows(sweep))
    with _Quietly():
        outcome = run_sweep(sweep, tmp_path / "a", Engine(name="dask", workers=1))
    assert outcome.exit_code == 0
    pd.testing.assert_frame_equal(table_of(sweep, outcome.rows), expected)


@pytest.fixture
def no_dask(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)


@pytest.mark.usefixtures("no_dask")
def test_without_dask_it_is_said_what_to_install(tmp_path):
    done = run(*BASE, *CARD, *GRID, "--engine", "dask", "--out", str(tmp_path / "a"))
    assert done.exit_code == 2
    assert "zenflow-offload[cluster]" in " ".join(done.output.split())
    assert not (tmp_path / "a").exists()


class _Quietly:
    """Dask's own loops warn about sockets and tasks that end with them; that is not ours."""

    def __enter__(self):
        import warnings

        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error):
        self._caught.__exit__(*error)


# ---- pictures and prices ----------------------------------------------------------------------


def test_the_front_holds_what_nothing_beats():
    table = pd.DataFrame({"a": [1, 2, 3, 4, 2], "b": [9, 5, 6, 1, 5]})
    assert front(table, "a", "b")[["a", "b"]].to_numpy().tolist() == [[1, 9], [2, 5], [4, 1]]


def test_lines_for_one_axis_a_map_for_two_and_panels_for_three():
    for axes, panels in (
        (("S=1,2,4",), 1),
        (("S=1,2", "dram=20,40"), 1),
        (("S=1,2,4", "dram=20,40,80", "strategy=zenflow,delayed"), 2),
    ):
        sweep = sweep_of(*axes)
        table = table_of(sweep, all_rows(sweep))
        figure = draw_sweep(table, sweep.axes, "step_seconds")
        drawn = [own for own in figure.axes if own.axison and own.get_label() != "<colorbar>"]
        assert len(drawn) == panels
        assert bool(drawn[0].lines) == (len(axes) == 1)
        assert bool(drawn[0].images) == (len(axes) > 1)
        if len(axes) == 2:
            shown = drawn[0].images[0].get_array()
            first = table[(table["S"] == 1) & (table["dram"] == 20)]
            assert shown[0, 0] == first["step_seconds"].iloc[0]
    assert draw_pareto(table, ["staleness_steps"]) is not None
    assert draw_sweep(table, [], "step_seconds") is None


def test_prices_add_up_and_unpriced_parts_are_left_empty():
    sweep = sweep_of("gpu=rtx4090,rtx5090", "host=epyc-7742,epyc-9654")
    table = table_of(sweep, all_rows(sweep))
    priced = add_prices(table, parse_prices(["RTX 4090=1000", "epyc-7742=500", "epyc-9654=900"]))
    values = list(priced["price"])
    assert values[:2] == [1500, 1900]
    assert all(math.isnan(value) for value in values[2:])


def test_help_and_lists_are_quick():
    assert "--vary" in run("sweep", "--help").output
    listed = run("sweep", "--axes").output
    assert all(name in listed for name in ("gpu", "dram", "GB/s", "cores"))
    assert "break-even" in run("sweep", "--studies").output
