"""PyTorch's AdamW on the host, as works of its lane."""

from __future__ import annotations

from sim.lanes import Work
from sim.machine import Machine
from sim.memory_parts import FLOAT_BYTES
from sim.timing.costs import StepCosts
from sim.timing.host_optimizers import CLIP_BYTES, fresh_bytes, host_optimizer


def optimizer_works(
    machine: Machine, costs: StepCosts, name: str, width: int, *, clips: bool = False
) -> list[tuple[str, Work]]:
    """Return the host's works of one device's step, which follow one another, with their names.

    Args:
        machine: What it runs on.
        costs: Of one step.
        name: Key of `sim.timing.host_optimizers.HOST_OPTIMIZERS`.
        width: Bytes of an element of the parameters that are updated.
        clips: Whether gradients are clipped on the host first.

    Raises:
        ConfigError: There is no such implementation.
    """
    chosen, devices = host_optimizer(name), machine.hardware.total_devices
    share, narrow = costs.num_params / devices, width / FLOAT_BYTES
    # In 16 bits a root and a division may take a core longer than the bytes do.
    steps = share * (chosen.steps if width < FLOAT_BYTES else 1.0)
    works = [("adam", machine.host_work(share * chosen.moved * narrow, steps))]
    if fresh := fresh_bytes(costs, name, devices, width):
        works.append(("pages", machine.fresh_pages(fresh)))
    if clips:
        works.insert(0, ("clip", machine.host_work(share * CLIP_BYTES * narrow)))
    return works
