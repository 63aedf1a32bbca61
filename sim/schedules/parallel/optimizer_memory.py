"""Device memory that an optimizer takes for a while."""

from __future__ import annotations

from sim.memory_parts import Part, SystemCase
from sim.timing.framework import optimizer_temporaries


def optimizer_part(case: SystemCase, elements: float, largest: float | None = None) -> Part:
    """Return the temporary memory of the optimizer that a system's options name.

    Args:
        case: Workload, machine and options.
        elements: Number of elements that a device updates.
        largest: Number of elements of the largest tensor of them; None is the model's largest
            parameter, of which the device has as large a part.
    """
    if largest is None:
        whole = max(parameter.numel for parameter in case.workload.parameters)
        largest = elements / case.params * whole
    taken = optimizer_temporaries(case.options["optimizer"], elements, largest, case.width)
    return Part("temporaries", "device", taken, "of AdamW")
