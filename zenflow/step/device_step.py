"""The device's part of a step: global norm, clip factor, scores, AdamW on its own columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow.columns.device_rows import update_residents
from zenflow.columns.layout import Layout, SplitParam
from zenflow.columns.local import local_of
from zenflow.device.base import AbstractDevice, HostValues
from zenflow.device.kernels.base import ColumnStep, DeviceKernels, Member
from zenflow.rule.adamw import Hyper
from zenflow.step.step import StepGradients
from zenflow.step.window_sketch import WindowSketch


def resident_grads_of(layout: Layout, gradients: StepGradients) -> list[Tensor]:
    """Return residents' gradients as float32, in the layout's order whatever their arrival.

    torch's fused AdamW goes by memory, and a gradient that a user has set may have another order
    there than its weight.
    """
    found, copies = [], []
    for place in layout.residents:
        if place in gradients.resident:
            grad, master = gradients.resident[place], place.master
            is_fit = grad.dtype == master.dtype and grad.stride() == master.stride()
            found.append(grad if is_fit else torch.empty_like(master))
            if not is_fit:
                copies.append((found[-1], grad))
    if copies:
        torch._foreach_copy_([copy for copy, _ in copies], [grad for _, grad in copies])
    return found


def measure_in_place(layout: Layout, device: AbstractDevice) -> None:
    """Measure the columns of gradients that are still in `.grad`, over all ranks."""
    measured = []
    for split in layout.splits:
        if split.param.grad is None:
            split.columns.energies.zero_()
        else:
            grad_OI = split.matrix(local_of(split.param.grad))
            measured.append((grad_OI, split.columns.energies, split.rows.energies))
    device.kernels.energies(measured)
    layout.shards.add_up(layout.columns.energies)


def squared_norm(layout: Layout, resident_grads: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm over all gradients of the step, float32, shape ().

    Both gradient modes use this function, so that they clip by the same bits. Columns' energies
    are summed over all ranks already.
    """
    squared = layout.columns.energies.sum()
    if resident_grads:
        of_rest = torch.stack(torch._foreach_norm(list(resident_grads))).square().sum()
        squared = squared + layout.shards.add_up(of_rest)
    return squared


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@dataclass(slots=True)
class Measured:
    """Measurements of one step's gradients."""

    factor: Tensor
    """Factor on the gradients, clip factor times inverse loss scale; shape (), on the device."""
    norm: Tensor
    """L2 norm over all gradients, the loss scale undone; shape (), on the device."""
    is_scaling: bool
    """Whether the factor can differ from 1."""
    values: HostValues
    """Values for the host: (factor, norm, important energy, total energy of split parameters),
    then the sketch's values, if there is a sketch."""


def measure(
    layout: Layout,
    device: AbstractDevice,
    resident_grads: Sequence[Tensor],
    *,
    max_norm: float | None,
    inverse_scale: float,
    sketch: WindowSketch | None,
) -> Measured:
    """Return the measurements of a step's gradients, the clip factor among them."""
    columns = layout.columns
    norm = squared_norm(layout, resident_grads).sqrt() * inverse_scale
    factor = torch.ones_like(norm)
    if max_norm is not None:
        factor = clip_factor(norm, max_norm)
    factor = factor * inverse_scale
    total = columns.energies.sum()
    important = torch.where(columns.is_important, columns.energies, 0.0).sum()
    values = torch.stack([factor, norm, important, total])
    if sketch is not None:
        values = torch.cat([values, sketch.read(columns, factor)])
    return Measured(
        factor=factor,
        norm=norm,
        is_scaling=max_norm is not None or inverse_scale != 1.0,
        values=device.to_host(values),
    )


def move_scores(
    layout: Layout, gradients: StepGradients, decay: float, inverse_scale: float
) -> None:
    """Update the scores of columns with a gradient by this step's energies."""
    gain = (1.0 - decay) * inverse_scale**2
    if len(gradients.important) == len(layout.splits):
        layout.columns.scores.mul_(decay).add_(layout.columns.energies, alpha=gain)
        return
    for split in gradients.important:
        split.columns.scores.mul_(decay).add_(split.columns.energies, alpha=gain)


@torch.no_grad()
def update_device(
    layout: Layout,
    gradients: StepGradients,
    resident_grads: list[Tensor],
    hypers: Sequence[Hyper],
    measured: Measured,
    kernels: DeviceKernels,
    applied: float = 1.0,
) -> None:
    """Apply AdamW to resident parameters and important columns.

    Args:
        layout: Places of all parameters.
        gradients: This step's gradients; a parameter without one is left alone, as torch does.
        resident_grads: Values of `resident_grads_of`; overwritten.
        hypers: Settings of each parameter group.
        measured: Measurements of the step, of which the factor is used.
        kernels: Kernels of the device.
        applied: Part of the factor that split parameters' gradients have already.
    """
    if measured.is_scaling and resident_grads:
        torch._foreach_mul_(resident_grads, measured.factor)
    places = [place for place in layout.residents if place in gradients.resident]
    for group, hyper in enumerate(hypers):
        chosen = [index for index, place in enumerate(places) if place.group == group]
        if chosen:
            update_residents(
                [places[index] for index in chosen],
                [resident_grads[index] for index in chosen],
                hyper,
            )
    factor = measured.factor if measured.is_scaling else None
    if factor is not None and applied != 1.0:
        factor = factor / applied
    kernels.update(
        [
            ColumnStep(
                bank.part(run[0].bank_first, run[-1].bank_last),
                [
                    Member(_weight(split), split.important_columns, gradients.important[split])
                    for split in run
                ],
                hypers[bank.group],
            )
            for bank, members in zip(layout.banks, layout.members, strict=True)
            for run in _runs(members, gradients)
        ],
        factor,
    )


def _runs(members: list[SplitParam], gradients: StepGradients) -> list[list[SplitParam]]:
    """Return a bank's members whose columns step together.

    All of them do, or each by itself where some have no gradient.
    """
    present = [split for split in members if split in gradients.important]
    if present and len(present) == len(members):
        return [present]
    return [[split] for split in present]


def _weight(split: SplitParam) -> Tensor | None:
    """Return where the step's important columns are written; None for a streamed weight.

    Its page may be away, and gets them at its next visit.
    """
    if split.page is None:
        return split.weight()
    if split.important_columns.numel():
        split.page.home_is_stale = split.page.device_is_stale = True
    return None
