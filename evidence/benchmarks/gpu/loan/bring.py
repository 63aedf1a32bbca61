"""Files that travel with the tree: wheels, pieces of a model, tokens; and the plan of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
CARRIED = Path("runs/loan")
KEPT = Path(tempfile.gettempdir()) / "zenflow-loan"
"""Folder where the files of one call wait for the next: the tree itself is copied anew."""
MODEL, TOKENS, WHEELS = "model.gguf", "tokens.npz", "wheels"
PEERS = (
    "torchao", "flashoptim", "hjson", "einops", "msgpack", "ninja", "py-cpuinfo", "pydantic",
    "pydantic-core", "annotated-types", "typing-inspection",
)  # fmt: skip
"""Other optimizers, and what DeepSpeed needs that a machine with transformers may lack."""
LARGE_PEER = "bitsandbytes"
"""Optimizer of 43 MB: too large beside the others, it travels with the call before theirs."""
_HALF = 48_000_000
"""Bytes of the model's first piece: what travels in a call is limited to 64 MiB."""


def missing_of(packages: Iterable[str]) -> list[str]:
    """Return the packages among some that can't be imported, each once."""
    return [name for name in dict.fromkeys(packages) if importlib.util.find_spec(name) is None]


def install(wheels: Path, kept: Path = KEPT) -> str:
    """Install wheels, offline, to where this process and those that it starts look for packages.

    Returns:
        What went wrong; nothing if nothing did.
    """
    found = sorted(wheels.glob("*.whl"))
    target = kept / "packages"
    if found:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        done = subprocess.run(
            [*pip, "--upgrade", "--target", str(target), *map(str, found)],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        if done.returncode:
            return f"wheels of {wheels} not installed: {done.stderr.strip()[-300:]}"
    if target.is_dir() and str(target) not in sys.path:
        sys.path.append(str(target))
        paths = [os.environ.get("PYTHONPATH"), str(target)]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(target / "bin")])
    importlib.invalidate_caches()
    return ""


def take_along(carried: Path, kept: Path = KEPT) -> None:
    """Copy what came with a call to where later calls find it, and join pieces that are all there.

    Pieces of a file are called `NAME.1of2` and so on.
    """
    kept.mkdir(parents=True, exist_ok=True)
    for path in sorted(carried.glob("*")):
        if path.is_file() and path.suffix != ".whl":
            shutil.copyfile(path, kept / path.name)
    for first in kept.glob("*.1of*"):
        name, _, count = first.name.rpartition(".1of")
        pieces = [kept / f"{name}.{number}of{count}" for number in range(1, int(count) + 1)]
        if all(piece.is_file() for piece in pieces):
            draft = kept / f".{name}"
            with open(draft, "wb") as whole:
                for piece in pieces:
                    with open(piece, "rb") as source:
                        shutil.copyfileobj(source, whole)
            draft.replace(kept / name)


def build_kernel() -> str:
    """Return a description of the host's kernel, compiled first where it is not there."""
    if not (REPOSITORY / "zenflow" / "host" / "_host_kernel.so").is_file():
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=REPOSITORY, capture_output=True, check=False, timeout=90)
    from zenflow.host import library

    return library.description()


def plan(calls: Iterable[int], needed: Sequence[str], commit: str | None) -> str:
    """Return the files to carry and the command to type."""
    wheels = CARRIED / WHEELS
    first, second, fourth, fifth = (CARRIED / number for number in "1245")
    lines = [
        "Before, where there is a network (GGUF, FOLDER and TEXTS are yours):",
        f"    mkdir -p {wheels} {first} {second} {fourth} {fifth}",
        f"    pip download --no-deps -d {wheels} {' '.join(needed)}",
        f"    pip download --no-deps -d {fourth} {LARGE_PEER}",
        f"    pip download --no-deps -d {fifth} {' '.join(PEERS)}",
        f"    DS_BUILD_OPS=0 pip wheel --no-deps -w {fifth} deepspeed",
        f"    python3 -m evidence.benchmarks.gpu.finetune --prepare {first / TOKENS} "
        "--model FOLDER --data TEXTS",
        f"    head -c {_HALF} GGUF > {first / MODEL}.1of2",
        f"    tail -c +{_HALF + 1} GGUF > {second / MODEL}.2of2",
        "Carry with each call, of what git ignores: "
        f"{wheels}, and with call N {CARRIED}/N where there is one.",
        "Wheels of call 4 stay for call 5, which measures other optimizers; without wheels "
        "these are rows that say so.",
        "Type, one after another (1, 3 and 2 tell most):",
    ]
    named = "" if commit is None else f" --commit {commit}"
    lines += [
        f"    python3 -m evidence.benchmarks.gpu.loan {number} --out $OUT{named}"
        for number in calls
    ]
    lines += [
        "Where there are fifteen minutes, starts included, type in their place:",
        f"    python3 -m evidence.benchmarks.gpu.loan 1 --out $OUT{named} --seconds 420",
        f"    python3 -m evidence.benchmarks.gpu.loan 3 --out $OUT{named} --seconds 240 "
        "--parts presets-8b-capped",
    ]
    if commit is None or commit.endswith("-dirty"):
        lines.append(f"The tree is of commit {commit or 'unknown'}: commit first, or no record "
                     "of it can be published.")  # fmt: skip
    return "\n".join(lines)
