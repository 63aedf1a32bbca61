"""The benchmark of the interpreter's load: its counts are the real model's, and it runs."""

import json
import select
import subprocess
import sys

import pytest
import torch

from evidence.benchmarks.interpreter import decoder_1b, load, turns
from evidence.benchmarks.interpreter.load import AGAINST, HERE, Load
from evidence.benchmarks.interpreter.lock_holders import LockFacts, LockWatch
from evidence.benchmarks.interpreter.played_gpu import played_gpu
from zenflow.columns.device_rows import NamedParam
from zenflow.columns.placement import assign_banks
from zenflow.host.kernel import active_kernel

needs_kernel = pytest.mark.skipif(active_kernel() != "c", reason="needs the C kernel")


def test_the_real_model_has_the_known_counts():
    counts = decoder_1b.real_counts()
    assert (counts.splits, counts.residents) == (1 + 7 * 16, 2 * 16 + 1)
    assert (counts.blocks, counts.buckets, counts.due) == (119, 25, (29, 30, 30, 30))


def test_the_shrunk_model_has_the_real_ones_banks():
    def num_banks(shapes):
        params = [
            NamedParam(torch.empty(shape, device="meta", dtype=torch.bfloat16), "p", 0)
            for shape in shapes
        ]
        return len(assign_banks(params, [round(0.1 * columns) for _, columns in shapes])[0])

    real = num_banks(decoder_1b.matrices())
    with decoder_1b.shrunk_limits():
        assert num_banks(decoder_1b.shrunk()) == real == 9


def test_other_counts_than_the_real_ones_are_refused():
    real = decoder_1b.real_counts()
    decoder_1b.check_counts(real, real)
    other = decoder_1b.Counts(1, real.residents, real.blocks, real.buckets, real.due)
    with pytest.raises(AssertionError, match=r"'splits': \(1, 113\)"):
        decoder_1b.check_counts(other, real)


@needs_kernel
@pytest.mark.parametrize("mode", [turns.RELEASE, turns.KEEP])
def test_a_turn_has_the_real_counts_and_times_every_thread(mode):
    real = decoder_1b.real_counts()
    with played_gpu(), decoder_1b.shrunk_limits(), turns.idle_kernel():
        contender = turns.Contender(mode, host_threads=2)
        try:
            decoder_1b.check_counts(decoder_1b.counts_of(contender.layout), real)
            found = turns.turn(contender, decoder_1b.INTERVAL, LockFacts())
            engine = contender.optimizer._running
            # What the counts do not show: pieces are cut where the real ones are.
            assert (engine.ring is not None) == (mode == turns.RELEASE)
            assert engine.schedule.tasks.depth == decoder_1b.INTERVAL
        finally:
            contender.optimizer.close()
    # Threads of other tests in this process may be there too.
    assert set(found) >= {"wall", "training", "d2h", "d2h-end", "h2d", "h2d-end", "host"}
    assert all(seconds >= 0 for seconds in found.values())
    assert found["training"] > 0


def test_ratios_are_by_round_and_spread():
    former = [Load(2.0, {"training": 3.0, "host": 1.0}, None), Load(4.0, {"training": 8.0}, None)]
    now = [Load(1.0, {"training": 1.0}, None), Load(1.0, {"training": 2.0, "d2h": 2.0}, None)]
    ratios = load.ratios_of(former, now)
    assert ratios["wall"]["quartiles"] == [2.5, 3.0, 3.5]
    assert ratios["cpu"]["quartiles"] == [2.5, 3.0, 3.5]
    assert "lock" not in ratios


@needs_kernel
@pytest.mark.slow
def test_versions_take_turns_in_processes_of_their_own(tmp_path, capsys):
    record = tmp_path / "record.json"
    arguments = ["--steps", "4", "--repeats", "1", "--role", "cpu", "--out", str(record)]
    load.main([*arguments, "--against", str(load.ROOT)])
    found = json.loads(record.read_text())
    assert found["counts"]["due"] == [29, 30, 30, 30]
    for rows in found["modes"].values():
        assert rows["ratios"]["cpu"]["median"] > 0
        assert all(rows[name]["cpu"]["training"]["median"] > 0 for name in (HERE, AGAINST))
    assert "against / this, cpu" in capsys.readouterr().out


SPINNING = """
import json, sys, threading, time
from evidence.benchmarks.interpreter.lock_holders import COUNTED, OTHER, LockFacts

def role_of(name):
    return {"MainThread": "training", "idle": "idle"}.get(name)

def spin(section):
    facts.section = section
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass

facts, over = LockFacts(), threading.Event()
threading.Thread(target=over.wait, name="idle", daemon=True).start()
print(json.dumps(facts.told(role_of)), flush=True)
sys.stdin.readline()
spin(OTHER)
spin(COUNTED)
print("over", flush=True)
"""


def test_the_lock_is_held_by_who_runs_and_counts_in_sections_only():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", SPINNING]
    with subprocess.Popen(command, cwd=load.ROOT, text=True, **pipes) as child:
        told = json.loads(child.stdout.readline())
        if told is None:
            child.kill()
            pytest.skip("this interpreter does not say who holds its lock")
        try:
            watch = LockWatch(child.pid, told)
        except OSError as error:
            child.kill()
            pytest.skip(f"another process's memory can't be read: {error}")
        child.stdin.write("\n")
        child.stdin.flush()
        held = watch.follow(lambda seconds: is_readable(child.stdout, seconds))
        watch.close()
    assert set(held) == {"training"}
    assert 0.1 < held["training"] < 0.35  # of 0.4 seconds


def is_readable(pipe, seconds):
    return bool(select.select([pipe], [], [], seconds)[0])
