"""Whether a GPU's engine leaves the host the bits that the CPU's leaves, byte for byte.

    python -m evidence.benchmarks.gpu.given [--out DIR]
    python -m evidence.benchmarks.gpu.given --smoke    small matrices; the CPU plays the GPU

Matrices of a 1B decoder get gradients that are given, all columns are deferred and nothing is
clipped. So the host's masters and moments follow from the gradients' bytes alone, by the C kernel
that both engines share: after some steps they must be bit-equal. A wrong byte of packing, ring,
queue or pool shows there. Where it comes from is told by sums of integers: over each packed block
on the device and over the same rows before the host reads them, and over each upload on both
sides. The GPU multiplies matrices meanwhile, so that copies are late.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from evidence.benchmarks.interpreter.played_gpu import played_gpu
from evidence.benchmarks.record import setting
from experiments.output.files import write_json
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.columns.gradient_queue import StagedGradient
from zenflow.device.base import Arrival
from zenflow.device.cuda import CudaDevice
from zenflow.host.jobs import AdamStep
from zenflow.lanes.lease import Lease
from zenflow.step.engine import Engine
from zenflow.step.gradients.ring import GradientRing, PackJob

STEPS = 9
"""Two windows and a step."""
_DRAWN = 1 << 27
"""Numbers that gradients are taken from, each from another place."""
_STRIDE = 1_000_003
_STATE = ("master", "exp_avg", "exp_avg_sq")
LAYERS = 9
"""Half of the 1B decoder's: the CPU's engine has to take the steps, too."""


def shapes_of(layers: int) -> list[tuple[int, int]]:
    """Return the matrices (O, I) of a 1B decoder with so many layers, in order of forward."""
    layer = [(2048, 2048)] * 4 + [(5632, 2048)] * 2 + [(2048, 5632)]
    return [(32_000, 2048), *layer * layers, (32_000, 2048)]


SMALL_SHAPES = [(96, 40), (33, 70), (64, 64), (7, 33)]


class Given(nn.Module):
    """Matrices whose gradients come one after another in backward, as they are given."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], numbers: Tensor, work: Callable[[], None]
    ) -> None:
        """Take weights and gradients from numbers.

        Args:
            shapes: Of the matrices, (O, I).
            numbers: What gradients and weights are cut from, bfloat16, on the device.
            work: Called before each gradient comes.
        """
        super().__init__()
        self._numbers, self._work = numbers, work
        self.weights = nn.ParameterList(
            nn.Parameter(self._cut(index, 0, shape).clone()) for index, shape in enumerate(shapes)
        )

    def _cut(self, index: int, step: int, shape: Sequence[int]) -> Tensor:
        size = shape[0] * shape[1]
        first = (index * 31 + step) * _STRIDE % (len(self._numbers) - size)
        return self._numbers[first : first + size].view(*shape)

    def backward(self, step: int) -> None:
        """Run a backward pass that brings the step's gradients, the last matrix's first."""
        chain = torch.zeros((), device=self._numbers.device, requires_grad=True)
        for index, weight in enumerate(self.weights):
            grad = self._cut(index, step, weight.shape)
            chain = _Brings.apply(chain, weight, grad, self._work)  # type: ignore[no-untyped-call]
        chain.backward()


class _Brings(torch.autograd.Function):
    """The identity of a scalar, whose backward has a gradient for a weight."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, weight: Tensor, grad: Tensor, work: Any) -> Tensor:
        del weight
        ctx.given = grad, work
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *chain: Tensor) -> tuple[Tensor | None, ...]:
        grad, work = ctx.given
        work()
        return chain[0], grad.clone(), None, None


def _sum_of(values: Tensor) -> Tensor:
    """Return the sum of the bits of bfloat16 numbers as integers, shape (), on their device."""
    return values.view(torch.int16).sum(dtype=torch.int64)


class Sums:
    """Sums over what leaves one side and over what the other side reads.

    Attributes:
        sent: By (step, address of the host's buffer): over the pieces that were packed.
        read: The same, of what the host reads.
        uploads: Over what an upload reads on the host, and over what came to the device.
    """

    def __init__(self) -> None:
        """Start with no sums."""
        self.sent: dict[tuple[int, int], list[Tensor]] = {}
        self.read: dict[tuple[int, int], Tensor] = {}
        self.uploads: list[tuple[Tensor, Tensor]] = []
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take sums of all that is packed, read and uploaded by engines inside."""
        pack, adam_step = GradientRing.pack, StagedGradient.adam_step
        arrived = CudaDevice._arrived

        def packed(
            ring: Any, piece: list[PackJob], *rest: Any
        ) -> tuple[list[tuple[Tensor, Tensor]], Lease]:
            found, slot = pack(ring, piece, *rest)
            for job, (room, host) in zip(piece, found, strict=True):
                first = host.data_ptr() - job.low * host.stride(0) * host.itemsize
                self.sent.setdefault((self.step, first), []).append(_sum_of(room))
            return found, slot

        def read(staged: StagedGradient) -> AdamStep:
            total = _sum_of(staged.values)
            with self._lock:
                self.read[staged.step, staged.values.data_ptr()] = total
            return adam_step(staged)

        def came(device: CudaDevice, arrival: Arrival) -> Tensor:
            before = _sum_of(arrival.values)
            values = arrived(device, arrival)
            self.uploads.append((before, _sum_of(values)))
            return values

        with ExitStack() as stack:
            for owner, name, function in (
                (GradientRing, "pack", packed),
                (StagedGradient, "adam_step", read),
                (CudaDevice, "_arrived", came),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            yield

    step = 0
    """Number of the step under way."""

    def wrong(self) -> dict[str, int]:
        """Return how many sums there are and how many differ, once all work has ended."""
        gradients = [
            (torch.stack(self.sent[key]).sum().cpu(), total) for key, total in self.read.items()
        ]
        uploads = [(before, after.cpu()) for before, after in self.uploads]
        return {
            "gradients": len(gradients),
            "wrong gradients": sum(int(a != b) for a, b in gradients),
            "uploads": len(uploads),
            "wrong uploads": sum(int(a != b) for a, b in uploads),
        }


def train(
    model: Given, steps: int, threads: int | None, on_step: Callable[[int], None]
) -> list[dict[str, Tensor]]:
    """Take steps; return the host's state of each matrix, with every gradient applied."""
    config = ZenFlowConfig(topk_ratio=0.0, min_split_elements=1)
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-3, config=config, offload_gradients="release",
        max_grad_norm=None, host_threads=threads,
    )  # fmt: skip
    with contextlib.closing(optimizer):
        for step in range(1, steps + 1):
            on_step(step)
            model.backward(step)
            optimizer.step()
        engine = optimizer._engine
        assert isinstance(engine, Engine)
        engine.drain()
        splits = engine.layout.splits
        return [{name: getattr(s.host.state, name).clone() for name in _STATE} for s in splits]


def wrong_bytes(ours: Sequence[dict[str, Tensor]], theirs: Sequence[dict[str, Tensor]]) -> int:
    """Return in how many bytes two states of the host differ."""
    return sum(
        int((one[name].view(torch.uint8) != other[name].view(torch.uint8)).sum())
        for one, other in zip(ours, theirs, strict=True)
        for name in _STATE
    )


def compare(
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    drawn: int,
    threads: int | None = None,
    as_gpu: AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:
    """Train on the CPU's engine and on a GPU's; return in what the host's state differs.

    Args:
        shapes: Of the matrices, (O, I).
        device: Device of the second run.
        drawn: Numbers that gradients are cut from.
        threads: Of the host; None is the default.
        as_gpu: Entered for the second run; it lets a CPU play a GPU.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(drawn, generator=generator).to(torch.bfloat16)
    started = time.perf_counter()
    expected = train(Given(shapes, numbers, lambda: None), STEPS, threads, lambda step: None)
    cpu_seconds = time.perf_counter() - started
    sums = Sums()
    started = time.perf_counter()
    with sums.taken(), as_gpu or nullcontext():
        model = Given(shapes, numbers.to(device), _load(device))
        found = train(model, STEPS, threads, lambda step: setattr(sums, "step", step))
    seconds = time.perf_counter() - started
    return {
        "shapes": [list(shape) for shape in shapes],
        "steps": STEPS,
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "bytes": sum(values.nbytes for state in expected for values in state.values()),
        "wrong_bytes": wrong_bytes(found, expected),
        "sums": sums.wrong(),
    }


def _load(device: torch.device) -> Callable[[], None]:
    """Return a function that keeps a GPU busy before each gradient; nothing for a CPU."""
    if device.type == "cpu":
        return lambda: None
    factor = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(2):
            factor @ factor

    return multiply


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare both engines; return the process's exit code, 1 if a byte is wrong."""
    parser = argparse.ArgumentParser(description="The host's bytes behind a GPU and behind a CPU.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_given"))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--smoke", action="store_true", help="small; the CPU plays the GPU")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device: install a CUDA build of torch", file=sys.stderr)
        return 2
    if options.smoke:
        cpu = torch.device("cpu")
        found = compare(SMALL_SHAPES, cpu, drawn=1 << 16, threads=1, as_gpu=played_gpu())
    else:
        found = compare(shapes_of(options.layers), torch.device("cuda:0"), drawn=_DRAWN)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "record.json", setting(smoke=options.smoke, **found))
    figures = {
        "wrong bytes": found["wrong_bytes"],
        **found["sums"],
        "seconds of the CPU's engine": found["cpu_seconds"],
        "seconds of the GPU's engine": found["seconds"],
    }
    write_json(options.out / "figures.json", figures)
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    wrong = (found["wrong_bytes"], *(n for name, n in found["sums"].items() if "wrong" in name))
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
