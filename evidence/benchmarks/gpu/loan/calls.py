"""The six calls of a loan: their parts, the limits of these, and what is expected of them.

If time is cut, calls 1, 3 and 2 tell most. Every part runs by itself, under `guard`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.benchmarks.gpu.loan.bring import MODEL, TOKENS

NEEDED = ("torch", "numpy", "psutil")
"""Packages without which no part can run."""
_SIMULATOR = ("simpy",)
"""Packages that the simulator loads, which predicts memory beside step times."""
_TESTING = ("pytest", "xdist", "pytest_timeout", "hypothesis")
_LARGE = "--steps 8 --warm-steps 2 --compute-steps 4"
"""Options of runs whose steps take seconds. A gradient more that waits, q, is 16 GB of host."""
_MARGIN = 15.0
"""Seconds that a series of runs leaves of its part, for its last run and its table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Folders and time that a part is given."""

    out: Path
    """Folder for its records."""
    kept: Path
    """Folder of the files that travelled with the tree."""
    seconds: float
    """Time that it has."""
    is_smoke: bool
    """Whether everything is tiny and on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a call, in processes of its own."""

    name: str
    """Name, which is that of its folder of records."""
    limit: float
    """Most seconds that it gets."""
    command: Callable[[Place], list[str]]
    """Function that returns its command line."""
    needs: tuple[str, ...] = ()
    """Packages without which it can't run, beside those that all parts need."""
    files: tuple[str, ...] = ()
    """Names of files that must have travelled with some call."""
    host_gib: float = 0.0
    """Host memory that must be free before it starts, in GiB."""


def _module(name: str, place: Place, *arguments: str) -> list[str]:
    smoke = ["--smoke"] if place.is_smoke else []
    return [sys.executable, "-m", name, "--out", str(place.out), *smoke, *arguments]


def _benchmark(name: str, *arguments: str) -> Callable[[Place], list[str]]:
    return lambda place: _module(f"evidence.benchmarks.gpu.{name}", place, *arguments)


def _series(name: str, runs: Sequence[str], options: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        limit = f"{max(_MARGIN, place.seconds - _MARGIN):.0f}"
        tiny = "smoke" if name.startswith("1b") else "smoke-parts"
        own = [tiny if place.is_smoke else name, "--limit", limit, "--runs", *runs]
        return _module("evidence.benchmarks.gpu.step", place, *own, *options.split())

    return command


STREAMS = "tests/zenflow/device/test_gpu_streams.py"
"""Tests of late streams and short memory, which say most about a GPU."""


_QUICK = "(gpu or gpu_too) and not slow"
"""Marks of the tests of a GPU that are no races."""


def _tests(marked: str, *arguments: str) -> Callable[[Place], list[str]]:
    """Return pytest's command: a line for each test, which stays if the rest is cut."""

    def command(place: Place) -> list[str]:
        from zenflow.host.limits import usable_cores  # which needs psutil: it may be missing

        folders = ["tests/zenflow/test_gpu.py"] if place.is_smoke else ["tests/zenflow"]
        workers = str(min(12, max(1, usable_cores() * 3 // 4)))
        options = ["-v", "-n", "0" if place.is_smoke else workers, "--timeout=240"]
        report = f"--junitxml={place.out / 'tests.xml'}"
        command = [sys.executable, "-m", "pytest", STREAMS, *folders, *options, report]
        anyway = ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
        return [*command, *anyway, "-m", marked, *arguments]

    return command


def _calibrate(place: Place) -> list[str]:
    device = ("cpu", "--turns", "1") if place.is_smoke else ("cuda",)
    command = [sys.executable, "-m", "experiments.cli", "calibrate", "--device", *device]
    return [*command, "--out", str(place.out / "profile.json")]


def _peers(place: Place) -> list[str]:
    limit = f"{max(_MARGIN, place.seconds - _MARGIN):.0f}"
    return _module("evidence.benchmarks.gpu.peers", place, "--limit", limit)


def _finetune(place: Place) -> list[str]:
    model, tokens = str(place.kept / MODEL), str(place.kept / TOKENS)
    files = [] if place.is_smoke else ["--model", model, "--tokens", tokens]
    return _module("evidence.benchmarks.gpu.finetune", place, *files)


CALLS: Mapping[int, tuple[Part, ...]] = {
    1: (
        Part(name="environment", limit=30, command=_benchmark("environment")),
        Part(name="tests", limit=190, command=_tests(_QUICK), needs=_TESTING),
        Part(name="given", limit=60, command=_benchmark("given"), host_gib=34),
        Part(
            name="presets-1b",
            needs=_SIMULATOR,
            limit=220,
            command=_series(
                "1b-short", ("torch_fused", "on_device", "zenflow", "zero_offload"), "--steps 24"
            ),
            host_gib=40,
        ),
        Part(name="device_pass", limit=40, command=_benchmark("device_pass"), host_gib=12),
        Part(
            name="races",
            limit=70,
            command=_tests("gpu and slow", "--race-steps", "150"),
            needs=_TESTING,
        ),
    ),
    2: (
        Part(
            name="finetune",
            limit=300,
            command=_finetune,
            needs=("transformers", "gguf"),
            files=(MODEL, TOKENS),
            host_gib=40,
        ),
        Part(name="kernels", limit=60, command=_benchmark("kernels"), host_gib=40),
        Part(
            name="tests-torch",
            limit=160,
            command=_tests(_QUICK, "--kernels", "torch"),
            needs=_TESTING,
        ),
    ),
    3: (
        Part(
            name="presets-8b-capped",
            needs=_SIMULATOR,
            limit=250,
            command=_series(
                "8b-capped",
                ("zenflow, k 0",),
                f"{_LARGE} --device-gib 23.6 --queue-depth 1",
            ),
            host_gib=112,
        ),
        Part(
            name="presets-8b",
            needs=_SIMULATOR,
            limit=290,
            command=_series("8b", ("torch_fused", "zenflow"), f"{_LARGE} --queue-depth 2"),
            host_gib=116,
        ),
    ),
    4: (
        Part(
            name="calibration",
            limit=280,
            command=_calibrate,
            needs=(*_SIMULATOR, "click", "rich"),
            host_gib=40,
        ),
        Part(
            name="presets-1b-launches",
            needs=_SIMULATOR,
            limit=200,
            command=_series(
                "1b-launches",
                ("on_device", "zenflow", "zenflow, torch's kernels", "zenflow, half the threads"),
                "--steps 24",
            ),
            host_gib=40,
        ),
    ),
    5: (Part(name="peers", limit=420, command=_peers, host_gib=64),),
    6: (
        Part(
            name="presets-8b-visits",
            needs=_SIMULATOR,
            limit=420,
            command=_series(
                "8b-visits",
                ("all stay", "half visit", "all visit"),
                f"{_LARGE} --queue-depth 2 --deterministic",
            ),
            host_gib=100,
        ),
    ),
}
"""Parts of each call, in order. What tells most comes first."""

PREDICTED: Mapping[int, Mapping[str, str]] = {
    1: {
        "given: wrong bytes": "0",
        "presets-1b: 1b, 8 x 1024: torch_fused, ms a step": "150",
        "presets-1b: 1b, 8 x 1024: on_device, ms a step": "162",
        "presets-1b: 1b, 8 x 1024: zenflow, ms a step": "180 to 190",
        "presets-1b: 1b, 8 x 1024: zero_offload, ms a step": "425",
        "presets-1b: 1b, 16 x 1024: torch_fused, ms a step": "290",
        "presets-1b: 1b, 16 x 1024: on_device, ms a step": "300",
        "presets-1b: 1b, 16 x 1024: zenflow, ms a step": "318 to 330",
        "presets-1b: 1b, 16 x 1024: zero_offload, ms a step": "563",
        "presets-1b: 1b, 8 x 1024: zenflow, ms of step()": "11 to 13",
        "device_pass: pack, 8192 x 2048, GB/s": "200 to 240",
        "device_pass: land, 8192 x 2048, GB/s": "about 100",
        "device_pass: fresh step, 8192 x 2048, ms per 10^9 parameters": "8 to 10",
    },
    2: {
        "finetune: loss above on_device's, S 4, %": "within 0.5",
        "finetune: loss above on_device's, S 16, %": "within 0.5",
        "finetune: resumed bit for bit": "True",
    },
    3: {
        "presets-8b-capped: 8b, 3 x 1024, recomputed: zenflow, k 0, peak GiB": "17 to 19",
        "presets-8b: 8b, 8 x 1024, recomputed: torch_fused, ms a step": "1100",
        "presets-8b: 8b, 8 x 1024, recomputed: zenflow, ms a step": "1300 to 1400",
    },
    4: {},
    5: {},
    6: {
        "presets-8b-visits: 8b, 4 x 1024, recomputed: losses that visits change": "0",
        "presets-8b-visits: 8b, 8 x 1024, recomputed: losses that visits change": "0",
    },
}
"""Numbers expected before anything had run: estimates, for an H100."""


def chosen(parts: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """Return the parts of some names, in their order; all without names.

    Raises:
        ValueError: There is no part of a name.
    """
    known = [part.name for part in parts]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"PART must be of {', '.join(known)}, got {', '.join(unknown)}")
    return [part for part in parts if not names or part.name in names]
