"""Runs of ``zenflow train`` that are killed again and again, and what is left of them.

Also a script, which takes minutes: ``python -m tests.experiments.deadly_runs [KILLS [INSIDE]]``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiments.training.parts.files.checkpoint import CHECKPOINTS, latest_checkpoint
from tests.experiments.runs import FAST, saved_tensors, steps, summary, train, trained, write_text
from tests.starts import environment
from tests.zenflow.test_resume import members_of_session

_FLAGS = (*FAST, "--schedule", "cosine", "--lr", "1e-3", "--select-interval", "4")
_SECONDS = 600.0
"""Most of one process: a run that hangs is a failure too."""
_OTHERS_SECONDS = 120.0
"""Longest life of shared memory that a test beside this one may have."""


@dataclass
class Deaths:
    """How often a run was killed, and in what."""

    loading: int = 0
    """Before its first step."""
    inside_a_save: int = 0
    elsewhere: int = 0
    steps: list[int] = field(default_factory=list)
    """Of the checkpoint left by each."""

    @property
    def total(self) -> int:
        """Kills."""
        return self.loading + self.inside_a_save + self.elsewhere


def start(*flags: object) -> subprocess.Popen[bytes]:
    """Start ``zenflow train``."""
    command = [sys.executable, "-m", "experiments.cli", "train", *map(str, flags)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=environment(OMP_NUM_THREADS="1"),
    )


def _watched(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Yield as often as possible while the process lives."""
    deadline = time.monotonic() + _SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run hangs"
        yield
    assert process.returncode == -signal.SIGKILL, process.communicate()[1].decode()


def unfinished(folder: Path) -> set[int]:
    """Return the inodes of what a save is writing or removing, or has left behind."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return set()
    return {entry.inode() for entry in entries if entry.name.startswith((".writing-", ".old-"))}


def kill_inside_a_save(process: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> None:
    """Kill at a random moment of a save, known by its temporary folder, behind a few others."""
    saves, was_saving = rng.randrange(2, 6), True
    for _ in _watched(process):
        time.sleep(0.0005)  # a save takes longer, and the run needs the core
        saving = bool(unfinished(folder))
        if saving and not was_saving:
            saves -= 1
            if not saves:
                time.sleep(rng.uniform(0, 0.005))
                process.kill()
        was_saving = saving


def kill_loading(process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Kill at a random moment before the first step, or soon after."""
    until = time.monotonic() + rng.uniform(0, 6)
    for _ in _watched(process):
        time.sleep(0.002)
        if time.monotonic() >= until:
            process.kill()


def kill_training(process: subprocess.Popen[bytes], out: Path, rng: random.Random) -> None:
    """Kill at a random moment of one of the next steps, or between them."""
    last, started = _saved(out / CHECKPOINTS) + rng.randrange(1, 60), time.time_ns()
    for _ in _watched(process):
        time.sleep(0.002)
        # The log is made anew when a run goes on: until then its rows are the former process's.
        if _written(out) > started and len(_rows(out)) >= last:
            time.sleep(rng.uniform(0, 0.05))
            process.kill()


def kill_and_resume(
    out: Path, flags: Sequence[object], *, kills: int, inside: int, seed: int
) -> Deaths:
    """Make a run that is killed so often, and resume it until it has ended.

    Args:
        out: Its folder.
        flags: Of the run.
        kills: In all.
        inside: So many of them inside a save.
        seed: Of the random moments.
    """
    rng, deaths = random.Random(seed), Deaths()
    shared = shared_memory()
    folder = out / CHECKPOINTS
    while deaths.total < kills or deaths.inside_a_save < inside:
        rows, former, begun = _rows(out), unfinished(folder), _saved(folder)
        process = _go_on(out, flags)
        chosen = rng.random()
        if deaths.inside_a_save < inside and chosen < 0.4:
            kill_inside_a_save(process, folder, rng)
        elif chosen < 0.8:
            kill_training(process, out, rng)
        else:
            kill_loading(process, rng)
        process.communicate()
        assert members_of_session(process.pid) == [], "a process was left behind"
        if unfinished(folder) - former:
            deaths.inside_a_save += 1
        elif _rows(out) == rows or len(_rows(out)) <= begun:
            deaths.loading += 1
        else:
            deaths.elsewhere += 1
        deaths.steps.append(_saved(folder))
        assert deaths.steps == sorted(deaths.steps), "a checkpoint was lost"
    _wait_until_gone(shared_memory() - shared)
    result = train("--resume", out)
    assert result.exit_code == 0, result.output
    return deaths


def _wait_until_gone(new: set[Path]) -> None:
    """Wait for other tests' shared memory to go; that of a killed process would stay."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    while new & shared_memory():
        assert time.monotonic() < deadline, "shared memory was left behind"
        time.sleep(0.1)


def shared_memory() -> set[Path]:
    """Return the segments of shared memory that processes of this machine have made."""
    place = Path("/dev/shm")
    return set(place.iterdir()) if place.is_dir() else set()


def _go_on(out: Path, flags: Sequence[object]) -> subprocess.Popen[bytes]:
    """Resume a run, or start it again where it has saved nothing."""
    if latest_checkpoint(out / CHECKPOINTS) is None:
        return start("--out", out, "--overwrite", *flags)
    return start("--resume", out)


def _saved(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    path = latest_checkpoint(folder)
    return int(path.name[5:]) if path else 0


def _written(out: Path) -> int:
    path = out / "steps.jsonl"
    return path.stat().st_mtime_ns if path.is_file() else 0


def _rows(out: Path) -> list[bytes]:
    path = out / "steps.jsonl"
    return path.read_bytes().splitlines() if path.is_file() else []


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return in what two runs differ: a bit of a weight, moment or loss, a step, a result."""
    found = []
    for name in ("loss", "grad_norm", "learning_rates", "step"):
        if [row[name] for row in steps(ours)] != [row[name] for row in steps(theirs)]:
            found.append(name)
    mine, others = saved_tensors(ours), saved_tensors(theirs)
    found += [f"tensors {sorted(mine.keys() ^ others.keys())}"] * (mine.keys() != others.keys())
    found += [name for name in mine if not torch.equal(mine[name], others[name])]
    found += ["eval_loss"] * (summary(ours)["eval_loss"] != summary(theirs)["eval_loss"])
    return found


def trial(
    folder: Path,
    *,
    kills: int,
    inside: int,
    num_steps: int,
    more: Sequence[object] = (),
    of_killed: Sequence[object] = (),
) -> Deaths:
    """Kill a run, compare it with one that was left alone and saved nothing on its way.

    Args:
        folder: Where both go.
        kills: Kills in all.
        inside: Number of them inside a save.
        num_steps: Steps of both.
        more: Flags of both.
        of_killed: Flags of the run that is killed.
    """
    text = write_text(folder / "text.txt")
    flags = [*_FLAGS, "--data", text, "--steps", num_steps, "--save-minutes", 0, *more]
    trained(folder / "whole", *flags)
    deaths = kill_and_resume(
        folder / "killed", [*flags, "--save-every", 5, *of_killed], kills=kills, inside=inside,
        seed=kills,
    )  # fmt: skip
    assert differences(folder / "killed", folder / "whole") == []
    left = [path.name for path in (folder / "killed" / CHECKPOINTS).iterdir()]
    assert left == [f"step-{num_steps:08d}"], left
    return deaths


if __name__ == "__main__":
    asked, within = ([int(value) for value in sys.argv[1:]] + [50, 10][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        done = trial(Path(place), kills=asked, inside=within, num_steps=60 * asked)
        sys.stdout.write(
            f"{done.total} kills in {time.monotonic() - begun:.0f} s: {done.inside_a_save} inside "
            f"a save, {done.loading} before a step, {done.elsewhere} between. Checkpoints left: "
            f"{done.steps}. Weights, moments and all {60 * asked} losses are those of the run "
            "that was left alone, bit for bit.\n"
        )
