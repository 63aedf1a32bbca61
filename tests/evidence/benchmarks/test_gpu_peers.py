"""Optimizers side by side: every engine is a row or a reason, and verdicts on resume are right."""

import json
import sys
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch

from evidence.benchmarks.gpu.peers import __main__ as peers
from evidence.benchmarks.gpu.peers import measure, resume, table
from evidence.benchmarks.gpu.peers.engine import Engine, Peer
from evidence.benchmarks.gpu.peers.engines import ENGINES
from evidence.benchmarks.gpu.setup import SERIES, SMOKE, Bench

CELL = SERIES["smoke"][0]
HERE = ("zenflow", "torch_fused", "torch_fused, float32 masters", "fsdp2, CPU offload")
"""Engines that need nothing but torch."""


def options_of(tmp_path, **changes):
    settings = {"smoke": True, "device": "cpu", "out": tmp_path, "engines": None, "limit": 60.0}
    return Namespace(**{**settings, "knobs": SMOKE["knobs"], **changes})


def bench(tmp_path):
    return Bench(CELL, options_of(tmp_path), 60, end=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", HERE)
def test_an_engine_of_this_machine_is_measured_and_resumes(name, tmp_path):
    row = measure.measure(name, ENGINES[name], bench(tmp_path), 0.0)
    window = row["window"]
    assert row["step_seconds"]["count"] == measure.whole_windows(0, window)
    assert (row["window_seconds"] is None) == (window == 1)
    assert (row["traffic"] is None) == (name != "zenflow")
    assert row["loss"] == pytest.approx(5.48, abs=0.03)
    assert row["tokens_per_second"] > 0
    assert row["peak_host_bytes"] > 0
    assert row["idle_share"] is row["peak_device_bytes"] is None, "a CPU has neither"
    assert resume.verdict(ENGINES[name], bench(tmp_path)) == resume.EXACT


class Forgetful(Engine):
    """An engine that saves weights alone."""

    def save(self, folder):
        torch.save(self.model.state_dict(), folder / "state.pt")

    def load(self, folder):
        self.model.load_state_dict(torch.load(folder / "state.pt"))


class Restless(Engine):
    """An engine whose steps differ from run to run."""

    runs = 0

    def step(self):
        Restless.runs += 1
        self.optimizer.param_groups[0]["lr"] = 1e-3 * Restless.runs
        super().step()


class Diverging(Engine):
    """An engine whose weights are soon no numbers."""

    def weights(self):
        return [torch.full_like(each, torch.nan) for each in super().weights()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Engine, resume.EXACT),
        (Forgetful, resume.INEXACT),
        (Restless, resume.UNTOLD),
        (Diverging, resume.NOT_FINITE),
    ],
)
def test_a_verdict_on_resume_is_right(kind, expected, tmp_path):
    peer = Peer(
        make=lambda model, _: kind(model, torch.optim.AdamW(model.parameters(), lr=1e-3)),
        state="stands in",
    )
    assert resume.verdict(peer, bench(tmp_path)) == expected
    assert not torch.are_deterministic_algorithms_enabled()


def test_each_step_has_its_own_time_and_a_collection_has_none(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock) ** 2))
    bare = Peer(make=lambda model, _: Engine(model, torch.optim.SGD(model.parameters())), state="")
    own = bench(tmp_path)
    steps = measure.Steps(bare.make(own.model(), own), own)
    monkeypatch.setattr(measure, "Pauses", lambda: nullcontext(measure.time.perf_counter()))
    steps.take(2)
    # Steps take two ticks and the collection one, so the first timed one begins at 3 ** 2.
    assert steps.timed(3) == [7.0, 9.0, 11.0]
    assert len(steps.losses) == 5


def test_windows_are_whole_and_their_slowest_position_stands_apart():
    assert measure.whole_windows(0.0, 1) == measure.LEAST
    assert measure.whole_windows(1e9, 1) == measure.MOST
    for window in range(1, 10):
        for count in (0, 7, 11, 99):
            steps = measure.whole_windows(count, window)
            assert steps % window == 0
            assert steps >= measure.LEAST
    assert measure.by_position([3.0, 1.0, 1.5, 5.0, 2.0, 1.0], 3) == {
        "slowest": 4.0, "others": 1.25,
    }  # fmt: skip
    assert measure.by_position([3.0, 1.0], 1) is None


def row_of(name, tokens=10.0, **changes):
    row = {
        "engine": name, "cell": str(CELL), "state": "a state", "resume": resume.EXACT,
        "step_seconds": {"median": 0.0125, "p95": 0.25},
        "window_seconds": {"slowest": 0.75, "others": 0.5},
        "tokens_per_second": tokens, "idle_share": 0.125,
        "traffic": {"d2h_bytes": 3e6, "h2d_bytes": 4e6},
        "peak_device_bytes": 5 * 10**9, "peak_host_bytes": 6 * 10**9, "loss": 2.5,
    }  # fmt: skip
    return {**row, **changes}


def test_the_table_has_every_number_and_every_reason():
    nothing = dict.fromkeys(("window_seconds", "idle_share", "traffic", "peak_device_bytes"))
    rows = [
        row_of("zenflow", 8.0),
        row_of("torch_fused", **nothing),
        {"engine": "deepspeed, ZenFlow", "cell": str(CELL), "failed": "not installed (deepspeed)"},
    ]
    heads, first, second, third = table.table(rows).splitlines()[:4]
    for column in ("median ms", "p95 ms", "slowest", "others", "tokens/s", "of fused", "idle %",
                   "d2h MB", "h2d MB", "device GB", "host GB", "loss", "resumes"):  # fmt: skip
        assert column in heads
    numbers = "12.5 250.0 750.0 500.0 8 0.800 12.5 3.0 4.0 5.00 6.00 2.5000 exact;"
    assert " ".join(first.split()).endswith(f"{numbers} a state")
    assert second.split().count("-") == 6
    assert third.endswith("not installed (deepspeed)")


def test_every_engine_is_a_row_or_a_reason(tmp_path, monkeypatch):
    """Those that can run have a stand-in's process here, for starting all of them takes long."""
    monkeypatch.setattr(peers, "rows_of", lambda name, *_: [row_of(name)])
    monkeypatch.setattr(peers, "compiled", lambda limit: "no compiler")
    monkeypatch.setattr(peers, "missing_of", lambda names: [n for n in names if n == "torchao"])
    assert peers.main(["--smoke", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    found = {row["engine"]: row.get("failed") for row in record["rows"]}
    assert list(found) == list(ENGINES)
    assert found == dict.fromkeys(ENGINES) | {
        "torchao, CPU offload": "not installed (torchao)",
        "flashoptim": "needs a GPU",
        "deepspeed, ZeRO-2 Offload": "no compiler",
        "deepspeed, ZenFlow": "no compiler",
        "deepspeed, SuperOffload": "needs a GPU",
    }
    assert {"hardware", "versions", "commit"} <= record.keys()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["tiny, 2 x 16: zenflow, ms a step"] == 12.5
    assert figures["tiny, 2 x 16: zenflow, of fused"] == 1.0


ENDS = {
    "import os; os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "import time; time.sleep(60)": "stopped after 1 s",
    "raise SystemExit(3)": "ended with code 3",
}


@pytest.mark.parametrize(("code", "reason"), ENDS.items())
def test_an_engine_that_dies_or_hangs_is_a_row(code, reason, tmp_path, monkeypatch):
    options = options_of(tmp_path)
    monkeypatch.setattr(peers, "command_of", lambda *_: [sys.executable, "-c", code])
    (row,) = peers.rows_of("zenflow", options, 1.0)
    assert row == {"engine": "zenflow", "cell": str(CELL), "failed": reason}


def test_an_engine_that_dies_behind_its_row_keeps_it(tmp_path, monkeypatch):
    measured = row_of("zenflow")
    del measured["resume"]
    done = json.dumps(measured)

    def command(name, options, rows, limit):
        code = f"open({str(rows)!r}, 'w').write({done!r} + '\\n' + '{{\"resume'); exit(3)"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(peers, "command_of", command)
    (row,) = peers.rows_of("zenflow", options_of(tmp_path), 10.0)
    assert row == row_of("zenflow", resume="not tried: ended with code 3")


def test_a_process_leaves_its_rows_and_its_verdict(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such kernel\nand much more")

    rows = tmp_path / "rows"
    monkeypatch.setitem(ENGINES, "zenflow", Peer(make=fails, state=""))
    options = options_of(tmp_path, rows=rows)
    peers.run_engine("zenflow", options)
    first, second = (json.loads(line) for line in rows.read_text().splitlines())
    said = "fails with RuntimeError: no such kernel"
    assert first == {"engine": "zenflow", "cell": str(CELL), "failed": said}
    assert second == {"resume": said}
