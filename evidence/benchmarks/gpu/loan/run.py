"""A call under way: its parts one after another, and its records behind each."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from evidence.benchmarks.gpu.loan.bring import KEPT, REPOSITORY, missing_of
from evidence.benchmarks.gpu.loan.calls import Part, Place
from evidence.benchmarks.gpu.loan.guard import OUT_OF_TIME, guarded
from evidence.benchmarks.gpu.loan.records import LOG, SUITE, save
from experiments.output.files import write_json
from zenflow.host.limits import free_bytes

_LEAST = 10.0
"""Seconds that must be left for another part to be begun."""
_REFRESH = 15.0
"""Seconds between two writings of the records while a part runs."""
_GRACE = 10.0
"""Seconds that a guard has to end a part's processes."""


class Call:
    """Runs parts and keeps the records whole, whenever this process is killed."""

    def __init__(
        self,
        whole: dict[str, Any],
        folder: Path,
        out: Path,
        predicted: Mapping[str, str],
        *,
        end: float,
    ) -> None:
        """Begin with no part.

        Args:
            whole: Record of the call; its list `parts` is filled.
            folder: Folder for the parts' own records.
            out: Folder that the archive and the table go to.
            predicted: What is expected of figures.
            end: When the call must be over, on the monotonic clock.
        """
        self._whole, self._folder, self._out = whole, folder, out
        self._predicted, self._end = predicted, end
        self._folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> str:
        """Write all records; return the table."""
        write_json(self._folder / SUITE, self._whole)
        return save(self._whole, self._folder, self._out, self._predicted)

    def take(self, part: Part) -> None:
        """Run a part, or say why it can't run; keep how it ended."""
        entry: dict[str, Any] = {"part": part.name, "limit": part.limit, "seconds": 0.0}
        self._whole["parts"].append(entry)
        if reason := self._reason_against(part):
            entry |= {"code": None, "ended": f"left out: {reason}"}
            self.save()
            return
        print(f"--- {part.name}", flush=True)
        entry |= {"code": None, "ended": "running when these records were written"}
        self.save()
        limit = min(part.limit, self._end - time.monotonic() - _GRACE)
        started = time.monotonic()
        try:
            code = self._run(part, limit)
            entry |= {"code": code, "ended": ending(code, limit)}
        except BaseException as error:
            entry |= {"code": None, "ended": f"stopped by {type(error).__name__}"}
            raise
        finally:
            entry["seconds"] = time.monotonic() - started
            self.save()

    def _reason_against(self, part: Part) -> str:
        """Return why a part can't run now; nothing if it can."""
        if missing := missing_of(part.needs):
            return f"needs {', '.join(missing)}"
        if self._end - time.monotonic() < _LEAST + _GRACE:
            return "no time"
        if self._whole["smoke"]:
            return ""
        if lacking := [name for name in part.files if not (KEPT / name).is_file()]:
            return f"{', '.join(lacking)} did not travel along"
        needed, free = part.host_gib, free_bytes()[0] / 2**30
        if free < needed:
            return f"needs {needed:.0f} GiB of free host memory, there are {free:.0f}"
        return ""

    def _run(self, part: Part, limit: float) -> int:
        """Run a part's processes; return the exit code."""
        out = self._folder / part.name
        out.mkdir(parents=True, exist_ok=True)
        place = Place(out=out, kept=KEPT, seconds=limit, is_smoke=self._whole["smoke"])
        command = guarded(part.command(place), limit)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(out / LOG, "wb") as log:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                return self._wait(process, time.monotonic() + limit + _GRACE)
            finally:
                _end(process)

    def _wait(self, process: subprocess.Popen[bytes], end: float) -> int:
        while (left := end - time.monotonic()) > 0:
            try:
                return process.wait(timeout=min(left, _REFRESH))
            except subprocess.TimeoutExpired:
                self.save()
        return OUT_OF_TIME


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a guard end its processes; do it for a guard that does not."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        for each in below:
            if each.is_running():
                each.kill()


def ending(code: int, limit: float) -> str:
    """Return how a part ended, in words."""
    if code == 0:
        return "done"
    return f"stopped after {limit:.0f} s" if code == OUT_OF_TIME else f"failed with code {code}"
