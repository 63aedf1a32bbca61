"""Load of a 1B model's step on the interpreter, thread by thread, and by version.

    python -m evidence.benchmarks.interpreter.load [--against CHECKOUT] [--role gpu|cpu]

One lock serves the thread that launches the device's work and all threads that help it. This says
how long each needs the CPU in a step, and for how long each holds the lock:

- The model is Llama 3.2 1B, shrunk until its arithmetic takes no time (`decoder_1b`).
- The host's C functions do nothing.
- By default the CPU plays a GPU (`played_gpu`): the engine goes a GPU's way.

Each version of the engine has a process of its own, and they take turns of some steps, a multiple
of the window. In release mode the time of a backward without hooks is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evidence.benchmarks.interpreter import decoder_1b
from evidence.benchmarks.interpreter.lock_holders import LockWatch
from evidence.benchmarks.interpreter.turns import CPU, GPU, KEEP, RELEASE
from evidence.benchmarks.record import setting, spread, take_turns
from experiments.output.files import write_json
from zenflow.commit import describe

ROOT = Path(__file__).resolve().parents[3]
HERE, AGAINST = "this", "against"
ALL, WALL = "all threads", "wall"


@dataclass(frozen=True)
class Load:
    """Cost of a step on the interpreter, in seconds."""

    wall: float
    cpu: dict[str, float]
    """CPU seconds by kind of thread."""
    lock: dict[str, float] | None
    """Seconds in which each kind of thread held the lock, sampled; None where nobody looked."""


class Process:
    """A version of the engine, waiting to take turns; to be closed."""

    def __init__(self, tree: Path, role: str, num_steps: int, host_threads: int) -> None:
        arguments = [
            *("--tree", str(tree), "--role", role, "--modes", f"{RELEASE},{KEEP}"),
            *("--steps", str(num_steps), "--host-threads", str(host_threads)),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evidence.benchmarks.interpreter.turns", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._num_steps = num_steps
        told = self._answer()
        self.counts = told["counts"]
        self._watch: LockWatch | None = None
        if told["lock"] is not None:
            try:
                self._watch = LockWatch(self._process.pid, told["lock"])
            except (OSError, ValueError) as error:
                print(f"the lock is not watched: {error}", file=sys.stderr)

    def _ask(self, wants: str, mode: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"wants": wants, "mode": mode}) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measured process ended with {self._process.wait()}: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _is_over(self, seconds: float) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def turn(self, mode: str) -> Load:
        """Take a turn."""
        self._ask("turn", mode)
        held = None if self._watch is None else self._watch.follow(self._is_over)
        cpu = self._answer()
        wall = cpu.pop("wall")
        if held is not None:
            held = {name: seconds / self._num_steps for name, seconds in held.items()}
        return Load(wall, cpu, held)

    def parts(self, mode: str) -> dict[str, float]:
        """Return the training thread's seconds by part."""
        self._ask("parts", mode)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._watch is not None:
            self._watch.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def rows_of(loads: list[Load]) -> dict[str, Any]:
    """Return spreads of wall time, and of CPU and lock time by thread and in all."""

    def by_thread(found: list[dict[str, float]]) -> dict[str, Any]:
        names = sorted({name for seconds in found for name in seconds})
        rows = {name: spread([seconds.get(name, 0.0) for seconds in found]) for name in names}
        return {**rows, ALL: spread([sum(seconds.values()) for seconds in found])}

    held = [load.lock for load in loads if load.lock is not None]
    return {
        WALL: spread([load.wall for load in loads]),
        "cpu": by_thread([load.cpu for load in loads]),
        "lock": by_thread(held) if held else None,
    }


def ratios_of(former: list[Load], now: list[Load]) -> dict[str, Any]:
    """Return spreads, over the rounds, of what a step took formerly by what it takes now."""

    def ratio(pick: Any) -> Any:
        return spread([pick(a) / pick(b) for a, b in zip(former, now, strict=True)])

    found = {
        WALL: ratio(lambda load: load.wall),
        "cpu": ratio(lambda load: sum(load.cpu.values())),
    }
    if all(load.lock for load in (*former, *now)):
        found["lock"] = ratio(lambda load: sum(load.lock.values()))
    return found


def measure(
    trees: dict[str, Path], role: str, num_steps: int, repeats: int, host_threads: int
) -> dict[str, Any]:
    """Return the record of all versions, taking turns."""
    processes: dict[str, Process] = {}
    try:
        for name, tree in trees.items():
            processes[name] = Process(tree, role, num_steps, host_threads)
        turns = {
            (name, mode): partial(process.turn, mode)
            for mode in (RELEASE, KEEP)
            for name, process in processes.items()
        }
        loads = take_turns(turns, repeats, 1)
        found: dict[str, Any] = {"counts": processes[HERE].counts, "modes": {}}
        for mode in (RELEASE, KEEP):
            row = {name: rows_of(loads[name, mode]) for name in processes}
            if AGAINST in processes:
                row["ratios"] = ratios_of(loads[AGAINST, mode], loads[HERE, mode])
            found["modes"][mode] = {**row, "parts": processes[HERE].parts(mode)}
        return found
    finally:
        for process in processes.values():
            process.close()


def show(found: dict[str, Any]) -> None:
    """Print milliseconds a step, and former by present."""
    print("counts:", ", ".join(f"{name} {value}" for name, value in found["counts"].items()))
    for mode, rows in found["modes"].items():
        for name in (HERE, AGAINST):
            if name in rows:
                print(f"\n{mode}, {name}, ms a step: wall {_middle(rows[name][WALL])}")
                for clock in ("cpu", "lock"):
                    threads = rows[name][clock] or {}
                    listed = ", ".join(f"{role} {_middle(row)}" for role, row in threads.items())
                    print(f"  {clock:<5}{listed or 'not measured'}")
        for clock, row in rows.get("ratios", {}).items():
            low, middle, high = row["quartiles"]
            print(f"  against / this, {clock}: {middle:.2f} ({low:.2f}..{high:.2f})")
        listed = ", ".join(f"{part} {1e3 * s:.2f}" for part, s in rows["parts"].items())
        print(f"  training thread by part, ms: {listed}")


def _middle(row: dict[str, Any]) -> str:
    low, middle, high = (1e3 * value for value in row["quartiles"])
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="checkout of another version, kernel built")
    parser.add_argument("--role", choices=[GPU, CPU], default=GPU, help="the device's")
    parser.add_argument("--steps", type=int, default=2 * decoder_1b.INTERVAL, help="of a turn")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--host-threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the whole record")
    options = parser.parse_args(arguments)
    if options.steps % decoder_1b.INTERVAL:
        parser.error(f"--steps must be a multiple of {decoder_1b.INTERVAL}, got {options.steps}")
    trees = {HERE: ROOT}
    if options.against is not None:
        trees[AGAINST] = options.against.resolve()
    found = measure(trees, options.role, options.steps, options.repeats, options.host_threads)
    whole = setting(
        role=options.role,
        steps=options.steps,
        repeats=options.repeats,
        host_threads=options.host_threads,
        against=describe(trees[AGAINST]) if AGAINST in trees else None,
        **found,
    )
    print(
        f"{whole['hardware']['cpu']}, commit {whole['commit']}, against {whole['against']}, load "
        f"average {whole['load_average']:.2f}, the device is a {options.role}'s role"
    )
    show(found)
    if options.out is not None:
        write_json(options.out, whole)
        print(f"\nrecord: {options.out}")


if __name__ == "__main__":
    main()
