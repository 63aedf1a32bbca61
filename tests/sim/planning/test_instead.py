"""Other systems that a plan names: AdamW in 8 bits, by the memory that a device has."""

import pytest

from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.instead import instead
from sim.planning.options import Planner

GIB = 1 << 30


def in_8_bits(device, model="qwen2.5-7b", **sizes):
    """Return AdamW in 8 bits as named for a desktop's card with so many GiB, or None."""
    hardware = find_machine("rtx4090-desktop", 1).with_values({"device.memory": device * GIB})
    work = Workload.of_config(*find_model(model), **{"batch_size": 1, **sizes})
    found = instead(Planner(hardware, reserve=GIB), work, None, recomputes=True)
    return next((option for option in found if option.strategy.name == "adamw_8bit"), None)


@pytest.mark.parametrize(
    ("device", "given"),
    [(80, {}), (40, {"paged": True}), (24, {"paged": True, "in_backward": True})],
)
def test_moments_leave_the_device_and_gradients_go_early_only_where_room_is_short(device, given):
    option = in_8_bits(device)
    assert option.fits
    assert option.strategy.options == given
    assert option.changes[: len(given)] == tuple(f"{name}=True" for name in given)


def test_updates_in_backward_are_of_one_micro_batch():
    option = in_8_bits(24, accumulation=4)
    assert option.strategy.options["in_backward"]
    assert option.need.workload.accumulation == 1


def test_nothing_is_named_where_the_weights_alone_are_too_large():
    assert in_8_bits(12) is None
