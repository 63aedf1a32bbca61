"""The engine's own pass over gradients and weights on a device, each part of it by itself.

    python -m evidence.benchmarks.gpu.device_pass [--out DIR]
    python -m evidence.benchmarks.gpu.device_pass --smoke    small matrices on the CPU

A part is one of the engine's functions on one matrix of bfloat16, at k = 0.1 and S = 4. GB/s count
what the part has to read and write at least, not what it does, so a share of the speed of a plain
copy says how far it is from the least time. Times are by CUDA events, behind a pause in which all
launches are queued; on a CPU by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evidence.benchmarks.record import setting
from experiments.calibration.parts import synchronize
from experiments.output.files import write_json, write_text
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.columns.layout import SplitParam
from zenflow.device.kernels.base import ColumnStep, DeviceKernels, LateGradient, Member
from zenflow.device.kernels.choice import KernelChoice, reason_against_triton
from zenflow.rule.adamw import Hyper
from zenflow.step.engine import Engine
from zenflow.step.gradients.ring import GradientRing, PackJob
from zenflow.step.step import Step

IMPLEMENTATIONS: tuple[KernelChoice, ...] = ("torch", "triton")
"""Kernels that are timed, side by side; on a CPU Triton's only where they are interpreted."""
SHAPES = ((2048, 2048), (8192, 2048), (4096, 4096), (14_336, 4096), (128_256, 2048))
SMALL_SHAPES = ((96, 64), (64, 96))
REPEATS = 10
_ON_CPU = 2
"""Repeats on a CPU, where nobody looks at the times."""
_PAUSE = 40_000_000
"""Cycles of the pause behind which launches are queued, about 20 milliseconds."""
_COPIED = 1 << 28
"""Bytes of the plain copy."""
_WAIT = 600.0


@dataclass(frozen=True, slots=True)
class Work:
    """A part of the pass on one matrix."""

    run: Callable[[], Any]
    """Function that launches it; what it returns is dropped, unless it is two events that enclose
    it on a stream of its own."""
    num_bytes: float
    """Bytes that it has to read and write at least."""


class Matrix:
    """One matrix under the engine's care, with a gradient of its shape."""

    def __init__(
        self, shape: tuple[int, int], device: torch.device, kernels: KernelChoice
    ) -> None:
        """Lay it out, and begin a step in which nothing lands."""
        generator = torch.Generator(device).manual_seed(0)
        weight, grad = (
            torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
            for _ in range(2)
        )
        config = ZenFlowConfig(min_split_elements=1, queue_depth=1)
        self.optimizer = ZenFlowAdamW(
            [nn.Parameter(weight)],
            config=config,
            offload_gradients="release",
            host_threads=1,
            kernels=kernels,
        )
        engine = self.optimizer._engine
        assert engine is not None
        self.engine: Engine = engine
        self.grad: Tensor = grad
        self.split: SplitParam = engine.layout.splits[0]
        self.ring = engine.ring or GradientRing(
            engine.device, [(len(self.split.host.staging), 2 * shape[0])], wait_timeout=_WAIT
        )
        assert engine.fresh is not None
        self.fresh = engine.fresh
        hypers = [Hyper.of(group) for group in self.optimizer.param_groups]
        step = Step(number=1, lag=engine.calendar.lag(1), hypers=hypers)
        self.fresh.begin(step, landing=frozenset())

    @property
    def kernels(self) -> DeviceKernels:
        """Kernels that are timed."""
        return self.engine.device.kernels

    @property
    def num_deferred(self) -> int:
        """Number of deferred columns."""
        return int(self.split.deferred_columns.numel())


def parts_of(matrix: Matrix) -> dict[str, Work]:
    """Return the parts of the pass on a matrix, as the engine runs them."""
    split, grad, kernels = matrix.split, matrix.grad, matrix.kernels
    rows, columns = grad.shape
    deferred, important = matrix.num_deferred * rows, split.important_columns.numel() * rows
    vectors, chosen = 4 * (rows + columns), [(grad, split.important_columns)]
    moving = split.weight(), grad, matrix.fresh._factors(split)
    return {
        "norms": Work(
            lambda: kernels.energies([(grad, split.columns.energies, split.rows.energies)]),
            2 * grad.numel() + vectors,
        ),
        "gather": Work(lambda: kernels.important(chosen), 4 * important),
        "factors": Work(_making_factors(matrix), 4 * (7 * columns + 6 * rows)),
        "fresh step": Work(lambda: kernels.move(*moving), 6 * grad.numel()),
        "pack": Work(_packing(matrix, moves=False), 4 * deferred),
        "fresh step and pack": Work(_packing(matrix, moves=True), 6 * grad.numel() + 2 * deferred),
        "land": Work(*_landing(matrix)),
        "AdamW of columns": Work(_updating(matrix), 28 * important),
    }


def _making_factors(matrix: Matrix) -> Callable[[], None]:
    """Return a function that computes the factors of a fresh step of the one matrix."""
    split, kernels, vectors = matrix.split, matrix.kernels, matrix.fresh._whole
    outputs = [(split.columns.fresh_factors, split.rows.fresh_factors)]

    def run() -> None:
        kernels.begin_factors(vectors)
        kernels.make_factors(vectors, outputs)

    return run


def _packing(matrix: Matrix, *, moves: bool) -> Callable[[], None]:
    """Return a function that packs all deferred columns into the ring, piece after piece."""
    kernels, split = matrix.kernels, matrix.split
    move = matrix.fresh._factors(split)
    in_pack = move if moves and kernels.moves_while_packing else None
    jobs = [
        PackJob.of(block, matrix.grad, block.host.staging, in_pack)
        for block in split.blocks
        if block.shape.num_deferred
    ]

    def run() -> None:
        if moves and in_pack is None:
            kernels.move(split.weight(), matrix.grad, move)
        matrix.ring.restart()
        for piece in matrix.ring.pieces(jobs):
            matrix.ring.pack(piece)

    return run


def _landing(matrix: Matrix) -> tuple[Callable[[], Any], float]:
    """Return a function that lands a window's share of the columns, and its bytes.

    What comes from the host is on the device already: the link is measured elsewhere.
    """
    split = matrix.split
    count = max(1, matrix.num_deferred // 4)
    columns = split.host_columns(0, count)
    values = split.weight().t().index_select(0, columns.indices)
    gradient = matrix.grad.t().index_select(0, columns.indices)
    late = LateGradient(gradient, is_packed=True, move=matrix.fresh._factors(split))
    num_bytes = 3 * values.nbytes  # the values and the gradient in, the weights out
    return lambda: matrix.kernels.land(values, columns, split.weight(), late), num_bytes


def _updating(matrix: Matrix) -> Callable[[], None]:
    """Return a function that steps the important columns and writes their weights."""
    split, device = matrix.split, matrix.grad.device
    columns = split.important_columns
    (gradient,) = matrix.kernels.important([(matrix.grad, columns)])
    members = [Member(split.weight(), columns, gradient)]
    state = split.bank.part(split.bank_first, split.bank_last)
    hyper = Hyper(1e-4, 0.9, 0.999, 1e-8, 0.01)
    factor = torch.ones((), device=device)
    step = ColumnStep(state, members, hyper)
    return lambda: matrix.kernels.update([step], factor)


@contextmanager
def laid_out(
    shape: tuple[int, int], device: torch.device, kernels: KernelChoice
) -> Iterator[Matrix]:
    """Yield a matrix under the engine's care; its threads end behind it."""
    matrix = Matrix(shape, device, kernels)
    try:
        yield matrix
    finally:
        matrix.optimizer.close()


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a piece of work, behind one that counts for nothing."""
    with torch.no_grad():
        work()
        synchronize(device)
        if device.type == "cpu":
            return statistics.median([_clocked(work) for _ in range(_ON_CPU)])
        torch.cuda._sleep(_PAUSE)
        spans = [_enclosed(work) for _ in range(REPEATS)]
        synchronize(device)
    return float(statistics.median(1e-3 * start.elapsed_time(end) for start, end in spans))


def _clocked(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _enclosed(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Launch a piece of work; return events before and behind it, its own if it has some."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    own = work()
    end.record()
    return own if isinstance(own, tuple) else (start, end)


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Return the speed of a plain copy on the device, bytes read plus written a second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def measure(shape: tuple[int, int], device: torch.device, rate: float) -> list[dict[str, Any]]:
    """Return a row for each part and implementation, on a matrix of this shape (O, I)."""
    rows = []
    runs_triton = not reason_against_triton(device)
    for name in IMPLEMENTATIONS if runs_triton else IMPLEMENTATIONS[:1]:
        with laid_out(shape, device, name) as matrix:
            for part, work in parts_of(matrix).items():
                seconds = seconds_of(work.run, device)
                speed = work.num_bytes / seconds
                rows.append(
                    {
                        "implementation": name,
                        "part": part,
                        "shape": list(shape),
                        "seconds": seconds,
                        "bytes": work.num_bytes,
                        "bytes_per_second": speed,
                        "share_of_copy": speed / rate,
                        "seconds_per_parameter": seconds / (shape[0] * shape[1]),
                    }
                )
    return rows


def table(rows: Sequence[Mapping[str, Any]], rate: float) -> str:
    """Return a line for each row."""
    lines = [
        f"a plain copy: {rate / 1e9:.0f} GB/s, read and written",
        f"{'part':<21}{'by':<8}{'shape':>16}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'ms/1e9':>10}",
    ]
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        lines.append(
            f"{row['part']:<21}{row['implementation']:<8}{shape:>16}{1e3 * row['seconds']:>9.3f}"
            f"{row['bytes_per_second'] / 1e9:>8.0f}{row['share_of_copy']:>9.2f}"
            f"{1e12 * row['seconds_per_parameter']:>10.2f}"
        )
    return "\n".join(lines)


def shown_figures(rows: Sequence[Mapping[str, Any]], shape: Sequence[int]) -> dict[str, float]:
    """Return speeds and times of one shape's parts, by name."""
    found = {}
    for row in rows:
        if row["shape"] == list(shape):
            by = "" if row["implementation"] == "torch" else f", {row['implementation']}"
            name = f"{row['part']}{by}, {' x '.join(map(str, shape))}"
            found[f"{name}, GB/s"] = row["bytes_per_second"] / 1e9
            found[f"{name}, ms per 10^9 parameters"] = 1e12 * row["seconds_per_parameter"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all parts on all shapes; return the process's exit code."""
    parser = argparse.ArgumentParser(description="The engine's own work on a device, by parts.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_device_pass"))
    parser.add_argument("--smoke", action="store_true", help="small, on the CPU: tests the script")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.smoke else "cuda:0")
    shapes = SMALL_SHAPES if options.smoke else SHAPES
    options.out.mkdir(parents=True, exist_ok=True)
    rate = copy_rate(device, 1 << 20 if options.smoke else _COPIED)
    whole = setting(smoke=options.smoke, copy_bytes_per_second=rate, rows=[])
    for shape in shapes:
        whole["rows"] += measure(shape, device, rate)
        write_json(options.out / "record.json", whole)
        shown = shapes[min(1, len(shapes) - 1)]
        write_json(options.out / "figures.json", shown_figures(whole["rows"], shown))
        write_text(options.out / "table.txt", table(whole["rows"], rate) + "\n")
    print(table(whole["rows"], rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
