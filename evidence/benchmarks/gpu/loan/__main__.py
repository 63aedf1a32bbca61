"""One call of a loan: parts one after another, whose records are whole whenever it is cut.

    python -m evidence.benchmarks.gpu.loan plan   what to carry, and the lines to type
    python -m evidence.benchmarks.gpu.loan N --out DIR   call N, of 1 to 6
    python -m evidence.benchmarks.gpu.loan N --out DIR --smoke  on the CPU, tiny

DIR gets records.tar.gz and table.txt, written anew while a part runs and behind it. Packages that
are missing are named first. Ends with code 0 if all parts did, with 1 if one did not, and with 2
where none can run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence.benchmarks.gpu.loan import bring
from evidence.benchmarks.gpu.loan.calls import CALLS, NEEDED, PREDICTED, Part, chosen

BROUGHT = ("simpy", "gguf")
"""Packages that a machine with torch and transformers may lack."""
_SECONDS = 560.0
"""Time of a call: a command may take ten minutes."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="A call of a loan.")
    add = parser.add_argument
    add("call", choices=["plan", *map(str, CALLS)], help="which, or what to bring and to type")
    add("--out", type=Path, default=Path("runs/gpu_loan"), help="for records.tar.gz, table.txt")
    add("--seconds", type=float, default=_SECONDS, help="for all parts together")
    add("--parts", nargs="+", metavar="PART", help="these only")
    add("--carried", type=Path, help=f"tokens, a model, wheels (default: {bring.CARRIED}/N)")
    add("--wheels", type=Path, default=bring.CARRIED / bring.WHEELS, help="to install, offline")
    add("--commit", help="of this tree, where git can't tell")
    add("--smoke", action="store_true", help="tiny, on the CPU: tests the script")
    return parser.parse_args(arguments)


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """List missing inputs and run a call; return the process's exit code."""
    end = time.monotonic()
    options = parse(arguments)
    end += options.seconds
    for folder in (options.wheels, options.carried or bring.CARRIED / options.call):
        if wrong := bring.install(folder):
            print(wrong, flush=True)
    if options.call == "plan":
        from zenflow.commit import commit

        print(bring.plan(CALLS, BROUGHT, commit()))
        return 0
    try:
        parts = chosen(CALLS[int(options.call)], options.parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    missing = bring.missing_of([*NEEDED, *(name for part in parts for name in part.needs)])
    is_vain = not {*NEEDED}.isdisjoint(missing)
    if missing:
        result = "nothing can run" if is_vain else "parts that need them are left out"
        print(f"missing packages: {', '.join(missing)}; {result}", flush=True)
    return 2 if is_vain else run(options, parts, missing, end)


def facts() -> dict[str, Any]:
    """Return hardware, versions and commit; asked elsewhere, since this process takes no GPU."""
    code = (
        "import json; from evidence.benchmarks.record import setting; print(json.dumps(setting()))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=bring.REPOSITORY, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(
    options: argparse.Namespace, parts: Sequence[Part], missing: Sequence[str], end: float
) -> int:
    """Run the parts; return the process's exit code."""
    from evidence.benchmarks.gpu.loan.records import forget_drafts
    from evidence.benchmarks.gpu.loan.run import Call
    from zenflow.commit import TOLD

    if options.commit is not None:
        os.environ[TOLD] = options.commit
    known = facts()
    if not options.smoke and known["hardware"]["gpu"] is None:
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    bring.take_along(options.carried or bring.CARRIED / options.call)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    forget_drafts(out)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    whole: dict[str, Any] = {
        **known,
        "call": int(options.call),
        "smoke": options.smoke,
        "kernel": bring.build_kernel(),
        "missing": list(missing),
        "parts": [],
    }
    with tempfile.TemporaryDirectory(prefix="zenflow-loan-") as folder:
        call = Call(whole, Path(folder) / f"call{options.call}", out,
                    PREDICTED[int(options.call)], end=end)  # fmt: skip
        for part in parts:
            call.take(part)
        print(f"\n{call.save()}", end="", flush=True)
    return 0 if all(part["code"] == 0 for part in whole["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
