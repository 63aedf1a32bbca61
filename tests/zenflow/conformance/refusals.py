"""Every refusal of what torch.optim.AdamW takes, or refuses with another error.

Each line is tried by `test_refusals`; `document` shows them in docs/limits.md.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zenflow.conformance import misuses
from tests.zenflow.conformance.subjects import affine
from zenflow import CheckpointError, GradientError
from zenflow.errors import NormError


@dataclass(frozen=True)
class Refusal:
    """Something that is refused, in every configuration or in release mode only."""

    what: str
    call: Callable[[Callable[..., torch.optim.Optimizer]], Any]
    """Does it, with what makes optimizers."""
    error: type[Exception]
    says: str
    """Start of the message."""
    torch: type[Exception] | None = None
    """What torch.optim.AdamW raises or warns of; None where it goes on."""


def _made() -> Iterator[Refusal]:
    for flag in ("maximize", "amsgrad", "capturable", "differentiable"):
        yield Refusal(
            f"`{flag}` as an argument",
            lambda make, flag=flag: misuses.made(make, **{flag: True}),
            TypeError,
            f"ZenFlowAdamW.__init__() got an unexpected keyword argument '{flag}'",
        )
    for flag in ("maximize", "amsgrad", "capturable", "differentiable"):
        yield _of_group(flag, True)
    yield _of_group("decoupled_weight_decay", False)
    yield Refusal(
        "parameters of float64",
        lambda make: misuses.made_of(make, nn.Parameter(torch.ones(4, 5).double())),
        ValueError,
        "weight is torch.float64: only float32, bfloat16 and float16 are trained",
    )
    yield Refusal(
        "complex parameters",
        lambda make: misuses.made_of(make, nn.Parameter(torch.ones(4, 5) * 1j)),
        ValueError,
        "weight is torch.complex64: only float32, bfloat16 and float16 are trained",
    )
    yield Refusal(
        "sparse parameters",
        lambda make: misuses.made_of(make, nn.Parameter(torch.eye(5).to_sparse())),
        ValueError,
        "weight is a torch.sparse_coo tensor: only dense parameters are trained",
    )
    yield Refusal(
        "parameters sharded by columns, as tensor parallelism has them",
        lambda make: misuses.made_of(make, misuses.sharded_by_columns()),
        ValueError,
        "weight has the placements (Shard(dim=1),): only parameters that are sharded along",
    )
    yield Refusal(
        "parameters on two devices",
        lambda make: misuses.made_of(make, *(nn.Parameter(t) for t in _on_two_devices())),
        ValueError,
        "all trainable parameters must be on one device",
    )
    yield Refusal(
        "parameters that are neither on a CPU nor on CUDA",
        lambda make: misuses.made_of(make, nn.Parameter(torch.ones(4, 5, device="meta"))),
        ValueError,
        "parameters are on meta",
    )
    yield Refusal(
        "two parameters over one storage",
        lambda make: misuses.made_of(make, *misuses.views_of_one_tensor()),
        ValueError,
        "bias and weight are two parameters over one storage",
    )
    yield Refusal(
        "a parameter twice in a group",
        lambda make: misuses.made_of(make, *[nn.Parameter(torch.ones(4, 5))] * 2),
        ValueError,
        "bias is weight again: give each parameter once",
        torch=UserWarning,
    )
    yield Refusal(
        "tensors that require no gradient, and no others",
        lambda make: misuses.made_of(make, torch.ones(4, 5)),
        ValueError,
        "there is no trainable parameter",
    )


def _of_group(flag: str, value: bool) -> Refusal:
    return Refusal(
        f"`{flag}={value}` in a parameter group",
        lambda make: misuses.in_group(make, **{flag: value}),
        ValueError,
        f"{flag}={value} in a parameter group is for torch's own AdamW",
    )


def _on_two_devices() -> Iterator[torch.Tensor]:
    return (torch.ones(4, 5, device=device) for device in ("cpu", "meta"))


def _step() -> Iterator[Refusal]:
    yield Refusal(
        "a sparse gradient",
        lambda make: misuses.step_with_gradient(make, lambda p: torch.ones_like(p).to_sparse()),
        GradientError,
        "the gradient of weight is torch.sparse_coo",
        torch=RuntimeError,
    )
    yield Refusal(
        "a gradient that is not finite",
        lambda make: misuses.step_with_gradient(make, lambda p: torch.full_like(p, torch.nan)),
        NormError,
        "the gradient norm of step 1 is nan: it must be finite",
    )
    for what, change in (
        (
            "weights changed in place after the first step, by clipping them, say",
            misuses.clamp_weights,
        ),
        ("a parameter's `.data` replaced after the first step", misuses.replace_memory),
    ):
        yield Refusal(
            what,
            lambda make, change=change: misuses.train_after(make, change),
            RuntimeError,
            "weight was changed after the optimizer was made",
        )
    yield Refusal(
        "an embedding with `max_norm`, which shortens its rows",
        misuses.renormalize_rows,
        RuntimeError,
        "weight was changed after the optimizer was made",
    )
    yield Refusal(
        "the same parameters trained by two optimizers",
        misuses.train_by_two,
        RuntimeError,
        "weight was changed after the optimizer was made",
    )
    yield Refusal(
        "the model cast to another dtype",
        misuses.cast,
        RuntimeError,
        "weight was cast from torch.float32 to torch.bfloat16 after the optimizer was made",
    )
    yield Refusal(
        "`optimizer.state` emptied, to reset it",
        lambda make: misuses.train_after(make, misuses.empty_state),
        RuntimeError,
        "optimizer.state was emptied, but only shows what the optimizer has",
    )
    yield Refusal(
        "`param_groups` with other parameters than before",
        lambda make: misuses.train_after(make, misuses.replace_parameter),
        RuntimeError,
        "param_groups have other parameters than the optimizer was made with",
    )
    yield Refusal(
        "a parameter that was frozen when the optimizer was made",
        misuses.unfreeze,
        RuntimeError,
        "a parameter of shape (10,) was frozen when the optimizer was made",
    )


def _state() -> Iterator[Refusal]:
    for what, copier in (
        ("`copy.deepcopy` of the optimizer", copy.deepcopy),
        ("`pickle` of the optimizer", pickle.dumps),
        ("`torch.save` of the optimizer", lambda optimizer: torch.save(optimizer, io.BytesIO())),
    ):
        yield Refusal(
            what,
            lambda make, copier=copier: copier(misuses.made(make)[1]),
            TypeError,
            "ZenFlowAdamW can't be copied or pickled: copy state_dict()",
        )
    yield Refusal(
        "a state of torch.optim.AdamW with `amsgrad`",
        lambda make: misuses.load(make, affine(), by=torch.optim.AdamW, amsgrad=True),
        CheckpointError,
        "the state is of another optimizer (amsgrad)",
    )
    yield Refusal(
        "a state of another optimizer than this one and torch.optim.AdamW",
        lambda make: misuses.load(make, affine(), by=torch.optim.Adagrad),
        CheckpointError,
        "the state is of another optimizer",
    )
    yield Refusal(
        "a state of a model in another dtype",
        lambda make: misuses.load(make, affine(lambda: torch.ones(10, 5).bfloat16())),
        CheckpointError,
        "the checkpoint is of another model",
    )
    yield Refusal(
        "a state of other parameter groups",
        lambda make: misuses.load(
            make, affine(params=lambda w, b: [{"params": [w]}, {"params": [b]}])
        ),
        CheckpointError,
        "the checkpoint has parameter groups of [1, 1] parameters, and this optimizer of [2]",
        torch=ValueError,
    )


def _release() -> Iterator[Refusal]:
    for what, use in (
        ("torch's `clip_grad_norm_`", lambda p, _: nn.utils.clip_grad_norm_([p], 1.0)),
        ("torch's `clip_grad_value_`", lambda p, _: nn.utils.clip_grad_value_([p], 1.0)),
        ("a look at `.grad` after backward", lambda p, _: p.grad.norm()),
        ("more backward passes than `accumulation_steps`", lambda p, _: p.sum().backward()),
    ):
        yield Refusal(
            what,
            lambda make, use=use: misuses.after_backward(make, use),
            GradientError,
            "the gradient of weight was released: it left for the host during backward",
        )
    yield Refusal(
        "another backward after `model.zero_grad()` or `.grad = None`",
        lambda make: misuses.after_backward(make, misuses.drop_and_go_on),
        GradientError,
        "the gradient of weight was dropped or replaced after it had left for the host",
    )
    yield Refusal(
        "another tensor in `.grad` between backward and step",
        lambda make: misuses.after_backward(make, misuses.replace_gradient),
        GradientError,
        "the gradient of weight was replaced after it had left for the host",
    )
    yield Refusal("`GradScaler.unscale_`", misuses.unscale, GradientError, "the gradient of")
    yield Refusal(
        "`state_dict` between backward and step",
        lambda make: misuses.after_backward(make, lambda _, optimizer: optimizer.state_dict()),
        GradientError,
        "state_dict() between backward and step(): gradients have left for the host",
    )
    yield Refusal(
        "`add_param_group` between backward and step",
        lambda make: misuses.after_backward(make, misuses.add_group),
        GradientError,
        "add_param_group() between backward and step(): gradients have left for the host",
    )
    yield Refusal(
        "`load_state_dict` between backward and step",
        misuses.load_after_backward,
        GradientError,
        "load_state_dict() between backward and step(): gradients have left for the host",
    )


REFUSALS = {
    "When the optimizer is made": list(_made()),
    "At a step": list(_step()),
    "Copies and states": list(_state()),
}
"""Refused in every configuration."""

OF_RELEASE_MODE = list(_release())
"""Refused in release mode, taken in keep mode."""
