"""Choice of the kernels: Triton's where a device runs them, torch's everywhere else."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Literal, get_args

import torch

from zenflow.device.kernels.base import DeviceKernels

_log = logging.getLogger(__name__)

KernelChoice = Literal["auto", "triton", "torch"]
CHOICES: tuple[str, ...] = get_args(KernelChoice)
"""Names by which kernels are chosen; "auto" takes the fastest that run."""


def kernels_for(
    choice: KernelChoice, device: torch.device, of_torch: DeviceKernels
) -> DeviceKernels:
    """Return the kernels of a device.

    Args:
        choice: One of `CHOICES`.
        device: Device of the matrices.
        of_torch: Kernels of torch's operations for this device.

    Raises:
        ValueError: Triton's kernels were asked for, and do not run there.
    """
    if choice == "torch" or (choice == "auto" and device.type == "cpu"):
        return of_torch
    why = reason_against_triton(device)
    if not why:
        from zenflow.device.kernels.triton_kernels import TritonKernels

        return TritonKernels(device)
    if choice == "triton":
        raise ValueError(f'kernels="triton" can\'t run on {device}: {why}; use "auto"')
    _log.warning("torch's kernels, which take longer, are used on %s: %s", device, why)
    return of_torch


@cache
def reason_against_triton(device: torch.device) -> str:
    """Return why Triton's kernels do not run on a device; nothing if they do."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from zenflow.device.kernels.triton_kernels import TritonKernels

    if device.type == "cpu":
        is_played = TritonKernels.is_interpreted()
        return "" if is_played else "a CPU runs them under TRITON_INTERPRET=1 only, for tests"
    matrix = torch.ones(2, 3, device=device)
    columns, rows = matrix.new_empty(3), matrix.new_empty(2)
    try:
        TritonKernels(device).energies([(matrix, columns, rows)])
    except Exception as error:  # noqa: BLE001 - a driver, a C compiler or an old GPU: all are reasons
        return f"{type(error).__name__}: {error}"
    return ""
