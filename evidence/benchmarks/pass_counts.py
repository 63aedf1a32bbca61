"""The engine's own pass on a GPU, counted: launches of a step, and bytes of each part.

    TRITON_INTERPRET=1 python -m evidence.benchmarks.pass_counts [--out FOLDER]

torch's operations and Triton's kernels, side by side, on a machine without a GPU:

- Launches are those of a step of a 1B decoder (`interpreter.decoder_1b`) whose device is played by
  the CPU. PyTorch's are counted where they are dispatched, Triton's at their launcher. Kernels of
  Triton do nothing here. A backward without the engine's hooks is subtracted.
- Bytes are those that each part of `gpu.device_pass` asks for on one matrix, beside the least that
  it needs by formula. Triton's interpreter counts elements of loads and stores, under their masks.
  Where several programs read a number each counts, though a cache has it.

Neither says how long a GPU takes.
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from evidence.benchmarks.dispatched import bytes_of, name_of, num_launches
from evidence.benchmarks.gpu.device_pass import IMPLEMENTATIONS, laid_out, parts_of
from evidence.benchmarks.interpreter import decoder_1b, turns
from evidence.benchmarks.interpreter.lock_holders import BARE
from evidence.benchmarks.interpreter.played_gpu import played_gpu
from evidence.benchmarks.record import setting
from experiments.output.files import write_json, write_text
from zenflow.device.cuda import CudaDevice
from zenflow.device.kernels import triton_source
from zenflow.device.kernels.torch_kernels import TorchKernels
from zenflow.device.kernels.triton_kernels import TritonKernels

MODES = (turns.RELEASE, turns.KEEP)
SHAPE = (decoder_1b.FEED_FORWARD, decoder_1b.HIDDEN)
"""Shape of the matrix whose bytes are counted: the MLP's of the 1B model."""
PARTS: Mapping[str, str] = {
    "energies": "norms",
    "important": "gather",
    "begin_factors": "factors",
    "make_factors": "factors",
    "move": "fresh step and pack",
    "pack": "fresh step and pack",
    "packed": "fresh step and pack",
    "land": "land",
    "update": "AdamW of columns",
}
"""Part of the pass by the function that launches it."""
STEP = tuple(dict.fromkeys(PARTS.values()))
"""Parts that make up a step."""
REST = "rest"
"""All other launches: clipping, scores, estimates, whole tensors."""
COPIES = "copies"
"""Copies of the link's lanes."""
KERNELS = (
    *("add_squares", "add_parts", "fresh_factors", "gather", "move_and_pack", "land", "adamw"),
)
"""Triton's kernels, by name."""
_WARM = decoder_1b.INTERVAL
_own = threading.local()


def is_lane() -> bool:
    """Whether the calling thread is a lane's."""
    return hasattr(_own, "lane")


class _Counting(TorchDispatchMode):
    """Tells of each operation of its thread that launches something."""

    def __init__(self, tell: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        returned = func(*args, **(kwargs or {}))
        if num_launches(func, args):
            self._tell(func, args, kwargs or {}, returned)
        return returned


class Launches:
    """Launches by part, of all threads that launch; in `turns` it is a meter."""

    def __init__(self) -> None:
        """Begin with none."""
        self.counts: Counter[str] = Counter()
        self.is_on = False
        self._adding = threading.Lock()

    def add(self, func: Any = None, args: Sequence[Any] = (), *_: Any) -> None:
        """Count launches of the calling thread; one of Triton's has no operation."""
        if self.is_on:
            count = 1 if func is None else num_launches(func, args)
            is_copy = func is not None and name_of(func) == "copy_" and is_lane()
            with self._adding:  # two lanes copy
                self.counts[COPIES if is_copy else self.part] += count * getattr(_own, "sign", 1)

    @property
    def part(self) -> str:
        """Part of the pass that the calling thread is in."""
        return getattr(_own, "part", REST)

    @contextmanager
    def section(self, kind: int) -> Iterator[None]:
        """Count the training thread's launches; those without the engine are subtracted."""
        _own.sign = -1 if kind == BARE else 1
        with _Counting(self.add):
            yield

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Have lanes' launches counted too, with the part that each belongs to."""
        with ExitStack() as stack:
            _count_lanes(stack, self.add)
            for name in KERNELS:
                stack.enter_context(mock.patch.object(triton_source, name, _Idle(self.add)))
            for owner in (TorchKernels, TritonKernels):
                for name in PARTS.keys() & vars(owner).keys():
                    _say_part(stack, owner, name)
            yield


class _Idle:
    """A kernel that is counted, and does nothing."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*_: Any, **__: Any) -> None:
            self._tell()

        return launch


def _count_lanes(stack: ExitStack, tell: Callable[..., None]) -> None:
    """Count the launches of a device's lanes from their threads' first moment on."""
    enter = CudaDevice.enter_thread

    def counted(device: CudaDevice, lane: str | None = None) -> None:
        enter(device, lane)
        if lane is not None:
            _own.lane = lane
            _Counting(tell).__enter__()  # type: ignore[no-untyped-call]

    stack.enter_context(mock.patch.object(CudaDevice, "enter_thread", counted))


def _say_part(stack: ExitStack, owner: Any, name: str) -> None:
    """Note the part of the pass while a function runs, unless another one has called it."""
    function = vars(owner)[name]

    def told(*args: Any, **kwargs: Any) -> Any:
        if hasattr(_own, "part"):
            return function(*args, **kwargs)
        _own.part = PARTS[name]
        try:
            return function(*args, **kwargs)
        finally:
            del _own.part

    stack.enter_context(mock.patch.object(owner, name, told))


def launches_of(kernels: str, mode: str) -> dict[str, float]:
    """Return the launches of a step by part, the mean over a window."""
    counted, real = Launches(), decoder_1b.real_counts()
    with played_gpu(), decoder_1b.shrunk_limits(), turns.idle_kernel(), counted.counting():
        contender = turns.Contender(mode, host_threads=1, kernels=kernels)
        try:
            decoder_1b.check_counts(decoder_1b.counts_of(contender.layout), real)
            for index in range(_WARM + decoder_1b.INTERVAL):
                if index == _WARM:
                    turns.settle()
                    counted.is_on = True
                contender.step(counted)
            turns.settle()
            counted.is_on = False
        finally:
            contender.optimizer.close()
    return {part: count / decoder_1b.INTERVAL for part, count in sorted(counted.counts.items())}


@contextmanager
def _counting_accesses(add: Callable[[int], None]) -> Iterator[None]:
    """Count the bytes of the interpreted kernels' loads and stores."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import _get_np_dtype as numpy_of

    with ExitStack() as stack:
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            access = vars(Builder)[name]

            def counted(
                own: Any, pointers: Any, *rest: Any, access: Any = access, place: int = place
            ) -> Any:
                size = numpy_of(pointers.get_element_ty()).itemsize
                add(int(rest[place - 1].data.sum()) * size)
                return access(own, pointers, *rest)

            stack.enter_context(mock.patch.object(Builder, name, counted))
        yield


def bytes_of_parts(kernels: Any, shape: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Return bytes for each parameter of a matrix: those asked for, and the least, by part."""
    found: Counter[str] = Counter()
    least: dict[str, float] = {}
    with played_gpu(), laid_out(shape, torch.device("cpu"), kernels) as matrix, torch.no_grad():
        for part, work in parts_of(matrix).items():

            def add(count: int, part: str = part) -> None:
                found[part] += count

            def tell(func: Any, *call: Any, part: str = part) -> None:
                found[part] += bytes_of(func, *call)

            with _counting_accesses(add), _Counting(tell), _unseen_interpreter():
                work.run()
            least[part] = work.num_bytes
    numel = shape[0] * shape[1]
    return {part: {"counted": found[part] / numel, "least": least[part] / numel} for part in least}


@contextmanager
def _unseen_interpreter() -> Iterator[None]:
    """Keep the operations by which Triton's interpreter copies arguments from being counted."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def unseen(own: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return call(own, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", unseen):
        yield


def measure(shape: tuple[int, int]) -> dict[str, Any]:
    """Return all counts."""
    return {
        "counts": asdict(decoder_1b.real_counts()),
        "shape": list(shape),
        "parts": [*STEP, REST],
        "launches": {
            mode: {name: launches_of(name, mode) for name in IMPLEMENTATIONS} for mode in MODES
        },
        "bytes": {name: bytes_of_parts(name, shape) for name in IMPLEMENTATIONS},
    }


def table(found: Mapping[str, Any]) -> str:
    """Return launches and bytes, a line for each part."""
    lines = [f"{'launches of a step':<22}" + "".join(f"{n:>10}" for n in IMPLEMENTATIONS)]
    for mode, by_kernels in found["launches"].items():
        lines.append(f"{mode}:")
        for part in (*STEP, REST, COPIES):
            own = [by_kernels[name].get(part, 0.0) for name in IMPLEMENTATIONS]
            lines.append(f"  {part:<20}" + "".join(f"{count:>10.1f}" for count in own))
        own = [sum(by_kernels[name].values()) for name in IMPLEMENTATIONS]
        lines.append(f"  {'all':<20}" + "".join(f"{count:>10.1f}" for count in own))
    shape = " x ".join(map(str, found["shape"]))
    lines += ["", f"{f'bytes a parameter, {shape}':<32}{'torch':>8}{'triton':>8}{'least':>8}"]
    rows = {
        part: [*(found["bytes"][name][part]["counted"] for name in IMPLEMENTATIONS), own["least"]]
        for part, own in found["bytes"]["triton"].items()
    }
    rows["a step"] = [sum(own) for own in zip(*(rows[part] for part in STEP), strict=True)]
    for part, row in rows.items():
        lines.append(f"  {part:<30}" + "".join(f"{count:>8.2f}" for count in row))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=SHAPE[0])
    parser.add_argument("--columns", type=int, default=SHAPE[1])
    parser.add_argument("--out", type=Path, help="folder for the record")
    options = parser.parse_args(arguments)
    if not TritonKernels.is_interpreted():
        parser.error("Triton's interpreter counts accesses: set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    found = {**setting(), **measure((options.rows, options.columns))}
    print(table(found))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "record.json", found)
        write_text(options.out / "table.txt", table(found) + "\n")


if __name__ == "__main__":
    main()
