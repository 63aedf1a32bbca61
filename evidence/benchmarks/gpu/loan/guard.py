"""Run a command that leaves no process behind: neither at its deadline nor when its caller dies.

    python -m evidence.benchmarks.gpu.loan.guard SECONDS COMMAND ...

The command's processes are ended together, those too that have made a session of their own.
Ends with the command's code, with 124 where its time was over and with 137 where its caller died.
Loads little, since it stays in memory beside what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

OUT_OF_TIME, CALLER_DIED = 124, 137
"""Exit codes, as timeout(1) and a shell have them."""
_BECOMES_PARENT_OF_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of Linux
_LOOKS = 0.05
"""Seconds between two looks at the command and at its caller."""


def guarded(command: Sequence[str], seconds: float) -> list[str]:
    """Return the command line that runs a command under guard, called by this process."""
    own = [
        sys.executable,
        "-m",
        "evidence.benchmarks.gpu.loan.guard",
        f"{seconds:.1f}",
        str(os.getpid()),
    ]
    return [*own, *command]


def run(command: Sequence[str], seconds: float, caller: int) -> int:
    """Run a command to its end, its deadline or its caller's death; return the exit code."""
    if sys.platform == "linux":  # else what outlives its parent can't be found any more
        ctypes.CDLL(None).prctl(_BECOMES_PARENT_OF_ORPHANS, 1, 0, 0, 0)
    end = time.monotonic() + seconds
    child = subprocess.Popen(command, start_new_session=True)
    try:
        while (code := child.poll()) is None:
            if os.getppid() != caller:
                return CALLER_DIED
            if time.monotonic() > end:
                return OUT_OF_TIME
            time.sleep(_LOOKS)
        return code
    finally:
        end_descendants()


def end_descendants() -> None:
    """Kill all processes below this one, until none is left."""
    me = psutil.Process()
    while below := me.children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        gone, _ = psutil.wait_procs(below, timeout=1.0)
        if not gone:
            return  # in an uninterruptible call: the kernel ends them behind it


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _stop)
    sys.exit(run(sys.argv[3:], float(sys.argv[1]), int(sys.argv[2])))
