"""Optimizers as a study's own loop needs them: a step at a rate, and a view of true weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.training.settings.training import TrainSettings
from zenflow.config import ZenFlowConfig
from zenflow.optimizer import ZenFlowAdamW


@dataclass(frozen=True, slots=True)
class Learner:
    """An optimizer as a loop needs it."""

    step: Callable[[float], None]
    """Function that takes a step at a learning rate."""
    true_weights: Callable[[], AbstractContextManager[None]]
    """Function that shows the true weights in a context."""


def groups_of(
    params: Sequence[nn.Parameter], settings: TrainSettings
) -> tuple[tuple[list[nn.Parameter], float], ...]:
    """Return parameters with their weight decay: matrices decay, vectors don't."""
    matrices = [param for param in params if param.ndim > 1]
    vectors = [param for param in params if param.ndim < 2]
    return (matrices, settings.weight_decay), (vectors, 0.0)


def adamw_arguments(params: Sequence[nn.Parameter], settings: TrainSettings) -> dict[str, Any]:
    """Return the arguments that torch's AdamW and the engine share."""
    return {
        "params": [
            {"params": own, "weight_decay": decay} for own, decay in groups_of(params, settings)
        ],
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
    }


def of_torch(
    optimizers: Sequence[Optimizer], params: Sequence[nn.Parameter], most: float | None
) -> Learner:
    """Return torch's optimizers, each of some parameters, as one learner.

    Args:
        optimizers: The optimizers; all take the same learning rate.
        params: All of their parameters, whose gradients are clipped together.
        most: Largest norm of the gradients; None does not clip.
    """
    return Learner(
        partial(_step, optimizers, partial(nn.utils.clip_grad_norm_, params), most), nullcontext
    )


@contextmanager
def of_engine(
    params: Sequence[nn.Parameter], config: ZenFlowConfig, settings: TrainSettings
) -> Iterator[Learner]:
    """Yield the engine as a learner, with one thread on the host."""
    arguments = adamw_arguments(params, settings)
    with closing(ZenFlowAdamW(**arguments, config=config, host_threads=1)) as engine:
        step = partial(_step, [engine], engine.clip_grad_norm_, settings.max_grad_norm)
        yield Learner(step, engine.true_weights)


def _step(
    optimizers: Sequence[Optimizer],
    clip: Callable[[float], Tensor],
    most: float | None,
    lr: float,
) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's compiled step reads it where it is
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
    if most is not None:
        clip(most)
    for optimizer in optimizers:
        optimizer.step()
