"""ZenFlowAdamW in a loop written with Accelerate."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from zenflow.optimizer import ZenFlowAdamW

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'zenflow.integrations.accelerate needs Accelerate: pip install "zenflow-offload[hf]"'
    ) from error


class ZenFlowAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc] # is untyped
    """Accelerate's wrapper, behind which all of `ZenFlowAdamW` can be reached.

    `report`, `memory`, `true_weights()`, `adopt_weights()`, `close()` and all other names are of
    the optimizer inside. Accelerate does not move its state.
    """

    def __init__(self, optimizer: ZenFlowAdamW, scaler: Any = None) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: The optimizer.
            scaler: Loss scaler of the accelerator; None where there is none.
        """
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._is_accelerate_prepared = True  # so that `prepare` takes it as it is

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the optimizer inside."""
        return getattr(self.__dict__["optimizer"], name)


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Prepare a model, optimizer, data loaders and schedulers, as `Accelerator.prepare` does.

    A `ZenFlowAdamW` among them keeps its state on the host and can be reached through its wrapper.
    `accelerator.clip_grad_norm_` lets it clip.

    Args:
        accelerator: The accelerator.
        *objects: Models, optimizers, data loaders and schedulers, in any order.

    Returns:
        The prepared objects in the same order; a single one as it is.

    Raises:
        ValueError: The optimizer and the accelerator don't go together.
    """
    ready = []
    for item in objects:
        if isinstance(item, ZenFlowAdamW):
            _check_pair(accelerator, item)
            route_clipping(accelerator, item)
            follow_backward(accelerator, item)
            ready.append(ZenFlowAcceleratedOptimizer(item, accelerator.scaler))
        else:
            ready.append(item)
    return accelerator.prepare(*ready)


def _check_pair(accelerator: Accelerator, optimizer: ZenFlowAdamW) -> None:
    if not optimizer.releases_gradients:
        return
    if accelerator.scaler is not None:
        raise ValueError(
            "release mode can't unscale gradients, and mixed_precision='fp16' scales the loss: "
            "use mixed_precision='bf16', or keep gradients until step()"
        )
    steps = accelerator.gradient_accumulation_steps
    if steps not in (1, optimizer.accumulation_steps):
        raise ValueError(
            f"the accelerator accumulates {steps} backward passes, and the optimizer was made for "
            f"{optimizer.accumulation_steps}: give it accumulation_steps={steps}"
        )


def unwrapped(optimizer: Any) -> ZenFlowAdamW | None:
    """Return the `ZenFlowAdamW` inside of Accelerate's wrappers; None for another optimizer."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, ZenFlowAdamW) else None


def route_clipping(accelerator: Accelerator, optimizer: ZenFlowAdamW) -> None:
    """Let `accelerator.clip_grad_norm_` clip in the optimizer where it is given its parameters.

    The optimizer then clips exactly, in both gradient modes by the same bits.
    """
    clipping = accelerator.__dict__.get("clip_grad_norm_")
    if not isinstance(clipping, _Clipping):
        clipping = accelerator.clip_grad_norm_ = _Clipping(accelerator)
    clipping.optimizers.add(optimizer)


def follow_backward(
    accelerator: Accelerator, optimizer: ZenFlowAdamW, *, always: bool = False
) -> None:
    """Let gradients leave in the backward pass in which the accelerator syncs gradients.

    The accelerator knows before each pass. The number of passes in a step may change in mid-run.

    Args:
        accelerator: The accelerator, whose `backward` is called for every pass.
        optimizer: The optimizer.
        always: Whether every pass is this optimizer's, a span of its timeline, and each step ends
            with the pass that syncs. Else steps do so where the accelerator accumulates: without
            it loops may accumulate by themselves.
    """
    if not optimizer.releases_gradients and not always:
        return
    backward = accelerator.__dict__.get("backward")
    if not isinstance(backward, _Backward):
        backward = accelerator.backward = _Backward(accelerator)
    backward.optimizers[optimizer] = always


class _Backward:
    """Stands for an accelerator's `backward`."""

    def __init__(self, accelerator: Accelerator) -> None:
        # Weakly, as in `_Clipping`.
        self._accelerator = weakref.ref(accelerator)
        self._of_accelerator = type(accelerator).backward
        self.optimizers: weakref.WeakKeyDictionary[ZenFlowAdamW, bool] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward pass, from which gradients leave if it is the step's last."""
        accelerator = self._accelerator()
        assert accelerator is not None
        with ExitStack() as spans:
            for optimizer, always in self.optimizers.items():
                accumulates = always or accelerator.gradient_accumulation_steps != 1
                if optimizer.releases_gradients and accumulates:
                    optimizer._source.expect_passes(1 if accelerator.sync_gradients else 2)
                if always:
                    spans.enter_context(optimizer.span("backward"))
            self._of_accelerator(accelerator, loss, **kwargs)


class _Clipping:
    """Stands for an accelerator's `clip_grad_norm_`."""

    def __init__(self, accelerator: Accelerator) -> None:
        # Both weakly: the accelerator has this object, and outlives optimizers.
        self._accelerator = weakref.ref(accelerator)
        self._of_accelerator = type(accelerator).clip_grad_norm_
        self.optimizers: weakref.WeakSet[ZenFlowAdamW] = weakref.WeakSet()

    def __call__(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Return the norm before clipping; None where the accelerator has none.

        Raises:
            ValueError: The norm is of a part of an optimizer's parameters, or no L2 norm.
            RuntimeError: Called between the micro-batches of a step.
        """
        accelerator = self._accelerator()
        assert accelerator is not None
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        meant = {p for p in given if p.requires_grad}
        for optimizer in self.optimizers:
            owned = {p for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
            if meant.isdisjoint(owned):
                continue
            _check_clipping(meant, owned, norm_type)
            if not accelerator.sync_gradients:
                raise RuntimeError(
                    "gradients are clipped once a step, not after each of its micro-batches: call "
                    "clip_grad_norm_ where accelerator.sync_gradients is true"
                )
            accelerator.unscale_gradients()
            return optimizer.clip_grad_norm_(max_norm)
        clipped: Tensor | None = self._of_accelerator(accelerator, given, max_norm, norm_type)
        return clipped


def _check_clipping(meant: set[Tensor], owned: set[Tensor], norm_type: float) -> None:
    counts = (
        f"clip_grad_norm_ got {len(meant)} trainable parameters, and the optimizer has "
        f"{len(owned)}"
    )
    if foreign := len(meant - owned):
        raise ValueError(
            f"{counts}: {foreign} of the former were unfrozen or added after it was made, and it "
            "does not train them. Unfreeze layers before that (a trainer makes it in train()), "
            "call optimizer.add_param_group({'params': [...]}) with them, or freeze them again"
        )
    if meant != owned:
        raise ValueError(
            f"{counts}: it clips by the norm of all of its own; give it model.parameters()"
        )
    if norm_type != 2:
        raise ValueError(f"ZenFlowAdamW clips by the L2 norm, got norm_type={norm_type}")
