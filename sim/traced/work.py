"""Work: kernels and copies of the device by kind, and the host's waits for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sim.traced.events import Event, KinetoTrace
from zenflow.errors import ConfigError
from zenflow.trace.intervals import Interval

Kind = Literal["products", "attention", "other", "collective", "copy"]

# Names of kernels as cuBLAS, CUTLASS, cuDNN, hipBLASLt and Triton give them, and of aten's ops.
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("collective", re.compile(r"nccl|rccl|oneccl")),
    ("attention", re.compile(r"flash|fmha|attention|attn|sdpa")),
    (
        "products",
        re.compile(
            r"gemm|cutlass|cublas|xmma|nvjet|wgmma|hmma|s884|s1688|s16816|cijk_|tensile|conv"
            r"|triton_mm|::(add|b|badd|_int_|_scaled_)?mm$|::(addmv|mv|dot)$|mkldnn_linear"
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of the device's work."""

    kind: Kind
    start: float
    end: float
    launched: float
    """Time at which the host launched it, seconds."""
    num_bytes: float = 0.0
    """Bytes of a copy between host and device."""


def kind_of(name: str) -> Kind:
    """Return the kind of a kernel or of an operation by its name.

    >>> kind_of("sm80_xmma_gemm_bf16bf16_bf16f32"), kind_of("aten::addmm"), kind_of("aten::add_")
    ('products', 'products', 'other')
    """
    folded = name.casefold()
    return next((kind for kind, names in _KINDS if names.search(folded)), "other")


def work_of(trace: KinetoTrace) -> list[Work]:
    """Return the work of the one device of a trace, in order.

    On a GPU these are kernels and copies; else the CPU is the device, and its operations are.

    Raises:
        ConfigError: Several GPUs worked, or launches are missing.
    """
    pieces = [event for event in trace.events if event.is_work]
    if not pieces:
        return list(_operations(trace.events))
    numbers = {piece.arguments.get("device") for piece in pieces}
    if len(numbers) > 1:
        raise ConfigError(
            f"{trace.path} has kernels of {len(numbers)} GPUs: trace one process with one GPU"
        )
    calls = {
        event.arguments["correlation"]: event.start
        for event in trace.events
        if event.is_call and "correlation" in event.arguments
    }
    found = [
        _gpu_work(piece, launched)
        for piece in pieces
        if (launched := calls.get(piece.arguments.get("correlation"))) is not None
    ]
    if len(found) < len(pieces) / 2:
        raise ConfigError(
            f"{trace.path} does not say what launched its kernels: profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    return found


def device_of(trace: KinetoTrace) -> str | None:
    """Return the name of the GPU that worked, as torch reports it; None of a CPU.

    Raises:
        ConfigError: The trace does not name it.
    """
    number = next((e.arguments.get("device") for e in trace.events if e.is_work), None)
    if number is None:
        return None
    if number not in trace.devices:
        raise ConfigError(f"{trace.path} does not name GPU {number}: use a newer torch.profiler")
    return trace.devices[number]


def _gpu_work(piece: Event, launched: float) -> Work:
    is_copy = piece.category == "gpu_memcpy" and re.search("HtoD|DtoH", piece.name) is not None
    kind = "copy" if is_copy else "other" if piece.category != "kernel" else kind_of(piece.name)
    num_bytes = float(piece.arguments.get("bytes", 0)) if is_copy else 0.0
    return Work(kind, piece.start, piece.end, launched, num_bytes)


def _operations(events: Iterable[Event]) -> Iterator[Work]:
    """Yield the operations that no other one contains, products and attention cut out.

    Of nested operations the outermost with a kind of its own counts: what it calls is its work.
    """
    ends: dict[str, float] = {}
    inner: dict[str, float] = {}
    for event in events:  # in the order of begins, the outer one first
        if event.category != "cpu_op" or "::" not in event.name or "autograd::" in event.name:
            continue
        kind, thread = kind_of(event.name), event.thread
        if event.start >= ends.get(thread, 0.0):
            ends[thread] = event.end
            yield Work("other", event.start, event.end, event.start)
        if kind != "other" and event.start >= inner.get(thread, 0.0):
            inner[thread] = event.end
            yield Work(kind, event.start, event.end, event.start)


def blocked_calls(trace: KinetoTrace) -> list[Interval]:
    """Return the intervals in which the host waited for the device.

    A synchronizing call waits throughout. Any other call waits from the usual end of calls like
    it.
    """
    calls = [event for event in trace.events if event.is_call]
    durations: dict[str, list[float]] = {}
    for call in calls:
        durations.setdefault(call.name, []).append(call.seconds)
    usual = {
        name: 0.0 if "Synchronize" in name else median(each) for name, each in durations.items()
    }
    return [
        (call.start + usual[call.name], call.end)
        for call in calls
        if call.seconds > usual[call.name]
    ]
