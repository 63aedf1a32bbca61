"""Baselines of the GPU benchmark: compute alone, whether it repeats, and torch's fused AdamW."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from evidence.benchmarks.gpu.setup import Bench
from evidence.benchmarks.record import spread
from experiments.calibration.parts import synchronize

_STRETCHES = 3
"""Number of times that some steps are timed together."""
_TIMES = 6
"""Number of times that one batch's gradients are computed."""


def compute_seconds(bench: Bench) -> dict[str, Any]:
    """Return the time of forward and backward alone: no optimizer can be faster.

    Gradients are dropped as they come, so that it fits wherever some optimizer does.
    """
    bench.free()
    model = bench.model()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    seconds = []
    for step in range(3 + bench.options.compute_steps):
        synchronize(bench.device)
        started = time.perf_counter()
        bench.loss(model, step).backward()
        synchronize(bench.device)
        seconds.append(time.perf_counter() - started)
    return spread(seconds[3:])


def _drop(param: Tensor) -> None:
    param.grad = None


def distinct_gradients(bench: Bench) -> dict[str, int]:
    """Return how often one batch's gradients were computed, and how many results differ.

    Kernels of attention may add up in the order in which blocks end. Then equal training runs end
    with unequal losses, whoever owns the optimizer.

    Returns:
        ``times`` and ``distinct``; with 1 of these every bit repeats.
    """
    bench.free()
    model = bench.model()
    sums: list[Tensor] = []

    def add_up(param: Tensor) -> None:
        assert param.grad is not None
        sums.append(param.grad.view(torch.int16).sum(dtype=torch.int64))
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(add_up)
    found = set()
    for _ in range(_TIMES):
        sums.clear()
        bench.loss(model, 0).backward()
        found.add(tuple(torch.stack(sums).tolist()))
    return {"times": _TIMES, "distinct": len(found)}


class FusedAdamW:
    """Torch's fused AdamW on the device, with clipping.

    Attributes:
        masters: Tensors that it steps: the model's parameters, or copies in float32.
        optimizer: Torch's.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float, max_norm: float, *, has_masters: bool
    ) -> None:
        """Take a model's parameters.

        Args:
            model: Model in bfloat16.
            learning_rate: Of AdamW.
            max_norm: L2 norm that all gradients are clipped to together.
            has_masters: Whether weights and moments are in float32, 12 bytes a parameter, and the
                model gets rounded copies; else all has the model's own dtype, 4 bytes.
        """
        self._params: list[Tensor] = list(model.parameters())
        self._max_norm, self._has_masters = max_norm, has_masters
        self.masters = [p.detach().float() for p in self._params] if has_masters else self._params
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, fused=True)

    def step(self) -> None:
        """Clip, take a step, and drop gradients."""
        nn.utils.clip_grad_norm_(self._params, self._max_norm)
        if self._has_masters:
            for master, param in zip(self.masters, self._params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._has_masters:
            with torch.no_grad():
                torch._foreach_copy_(self._params, self.masters)


def fused_baseline(
    bench: Bench, learning_rate: float, max_norm: float, *, has_masters: bool = False
) -> dict[str, Any] | None:
    """Return times and memory of steps with torch's fused AdamW, as many people run it.

    Without float32 masters it moves fewer bytes than `on_device`, and rounds more. Steps follow
    each other without a wait, as in training.

    Returns:
        The record; None where it does not fit.
    """
    bench.free()
    try:
        model = bench.model()
        fused = FusedAdamW(model, learning_rate, max_norm, has_masters=has_masters)
        bench.forget_peak()
        seconds, count = [], bench.options.compute_steps
        for _ in range(1 + _STRETCHES):
            synchronize(bench.device)
            started = time.perf_counter()
            for number in range(count):
                loss = bench.loss(model, number)
                loss.backward()
                fused.step()
            synchronize(bench.device)
            seconds.append((time.perf_counter() - started) / count)
    except torch.OutOfMemoryError:
        return None
    timed = spread(seconds[1:])
    return {
        "step_seconds": timed,
        "tokens_per_second": bench.tokens / timed["median"],
        "peak_device_bytes": bench.peak_bytes(),
        "last_loss": float(loss.detach()),
    }
