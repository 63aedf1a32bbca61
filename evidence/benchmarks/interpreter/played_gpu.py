"""A GPU's part, played by the CPU: the engine takes the way of a GPU, and nothing is asynchronous.

Streams and events are plain objects, pinned memory is any memory, and a "kernel" is the CPU's
operation, over when it returns. So times of kernels mean nothing here. What the engine asks of
the interpreter is that of a GPU, but for CUDA's own calls: an event costs an object instead.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_NAMES = (
    ("zenflow.surface.assembly", "zenflow.device.cuda"),
    ("zenflow.assembly", "zenflow.cuda_device"),  # an earlier version's
)


class _Stream:
    """A stream, which has nothing to wait for."""

    def __init__(self, *_: Any) -> None:
        """Make a stream of any device."""

    def wait_event(self, event: Any) -> None:
        """Go on: what was recorded is over."""

    def query(self) -> bool:
        """Return that nothing is under way."""
        return True


class _Event:
    """An event, passed as soon as it is recorded."""

    def __init__(self, **_: Any) -> None:
        self._seconds = 0.0

    def record(self, _: Any = None) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Return: the event has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later._seconds - self._seconds)


_COMPUTE = _Stream()
_own = threading.local()


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _replacements() -> dict[str, Any]:
    return {
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "current_stream": lambda _=None: getattr(_own, "stream", _COMPUTE),
        "set_stream": lambda stream: setattr(_own, "stream", stream),
        "set_device": _nothing,
        "synchronize": _nothing,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
        ),
    }


@contextmanager
def played_gpu(*, trains: bool = False) -> Iterator[None]:
    """Let optimizers that are made inside take parameters on the CPU for a GPU's.

    Args:
        trains: Whether the weights matter: a CPU's kernels then compute what a GPU's would. Else
            sums stand for norms, which take a CPU long and are alike for the interpreter.
    """
    for names in _NAMES:
        try:
            assembly, device = (importlib.import_module(name) for name in names)
            break
        except ModuleNotFoundError:
            continue
    # Its tables are filled when the first optimizer is made, and refuse replaced functions.
    importlib.import_module("torch._dynamo")
    with ExitStack() as stack:
        for name, replacement in _replacements().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for maker in ("empty", "tensor"):
            unpinned = _unpinned(getattr(torch, maker))
            stack.enter_context(mock.patch.object(torch, maker, unpinned))
        if trains:
            quick = importlib.import_module("zenflow.device.kernels.torch_kernels").CpuKernels
            stack.enter_context(mock.patch.object(device, "TorchKernels", quick))
        else:
            stack.enter_context(mock.patch.object(torch.linalg, "vector_norm", torch.sum))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _nothing))
        stack.enter_context(mock.patch.object(assembly, "bind", device.CudaDevice))
        yield
