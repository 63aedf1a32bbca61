"""What a framework adds: hand-made figures, and where nothing is to be added."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.simulate import Strategy, simulate
from sim.timing.costs import costs_of
from sim.timing.framework import (
    Hooks,
    ddp_hooks,
    deepspeed_hooks,
    fsdp2_hooks,
    optimizer_seconds,
    with_hooks,
    zero3_hooks,
)
from sim.timing.phases import costs_of_phases
from zenflow.errors import ConfigError

FORWARD = Hooks(unit=1e-3, parameter=1e-4, moved=8.0)
BACKWARD = Hooks(unit=2e-3, parameter_kernels=3, moved=4.0)
LAUNCH = 5e-6


def costs(tokens, devices=2, machine="dgx-a100-80", **settings):
    """Return the costs of a small decoder whose layers are pieces, on so many devices."""
    name, config = find_model("qwen2.5-0.5b")
    work = Workload.of_config(name, config, sequence=tokens, **settings)
    hardware = find_machine(machine, devices)
    return costs_of(work, hardware.with_values({"device.compiled_launch": LAUNCH}))


def layer(found):
    """Return the segments of the first layer with attention, summed up."""
    first = next(s.layer or s.name for s in found.segments if "layers.0" in (s.layer or s.name))
    parts = [s for s in found.segments if (s.layer or s.name) == first]
    return {
        "forward": sum(s.forward for s in parts),
        "backward": sum(s.backward for s in parts),
        "launching": [sum(s.launching[i] for s in parts) for i in (0, 1)],
        "numel": sum(s.numel for s in parts),
        "parameters": sum(s.num_parameters for s in parts),
    }


def test_a_layer_that_launches_bind_waits_for_hooks_too():
    before = costs(8)
    plain, hooked = layer(before), layer(with_hooks(before, FORWARD, BACKWARD))
    assert plain["parameters"] == 12  # seven matrices, three biases, two norms
    assert plain["forward"] == pytest.approx(plain["launching"][0])
    assert hooked["forward"] == pytest.approx(plain["forward"] + 1e-3 + 12 * 1e-4)
    assert hooked["backward"] == pytest.approx(plain["backward"] + 2e-3 + 12 * 3 * LAUNCH)


def test_a_layer_that_the_device_binds_takes_what_hooks_move():
    before = costs(8192, batch_size=8)
    plain, hooked = layer(before), layer(with_hooks(before, FORWARD, BACKWARD))
    each = plain["numel"] / before.elementwise_bandwidth
    assert hooked["forward"] == pytest.approx(plain["forward"] + 8 * each)
    assert hooked["backward"] == pytest.approx(plain["backward"] + 4 * each)


def test_what_was_given_has_it_already():
    given = costs_of_phases(forward=1.0, backward=2.0, d2h=1.0, update=1.0, h2d=1.0,
                            num_params=10_000)  # fmt: skip
    assert with_hooks(given, FORWARD, BACKWARD) is given


def test_a_cpus_layers_take_what_hooks_move_and_their_seconds():
    found = costs(8)
    device = replace(found.hardware.device, is_cpu=True)
    on_cpu = replace(found, hardware=replace(found.hardware, device=device))
    before, after = layer(on_cpu), layer(with_hooks(on_cpu, FORWARD, BACKWARD))
    each = before["numel"] / on_cpu.elementwise_bandwidth
    hosts = 1e-3 + 12 * 1e-4, 2e-3 + 12 * 3 * LAUNCH
    assert after["forward"] - before["forward"] == pytest.approx(8 * each + hosts[0])
    assert after["backward"] - before["backward"] == pytest.approx(4 * each + hosts[1])


def test_gradients_that_stay_in_buckets_are_copied_once():
    before = costs(8192, batch_size=8)
    plain, once, twice = (
        layer(each) for each in (before, ddp_hooks(before, in_buckets=True), ddp_hooks(before))
    )
    copied = once["backward"] - plain["backward"]
    assert copied == pytest.approx(4 * plain["numel"] / before.elementwise_bandwidth)
    assert twice["backward"] - plain["backward"] == pytest.approx(2 * copied)


def test_one_device_averages_nothing_and_runs_the_hooks_of_shards():
    alone = costs(8, devices=1)
    assert ddp_hooks(alone) is alone
    hooked = fsdp2_hooks(alone, reshards=True, reduce_bytes=2)
    assert layer(hooked)["forward"] > layer(alone)["forward"] + 0.9e-3


def test_what_is_not_gathered_again_is_not_copied_again():
    before = costs(8192, batch_size=8)
    kept, again = (
        layer(fsdp2_hooks(before, reshards=is_so, reduce_bytes=2)) for is_so in (False, True)
    )
    copied = 4 * (1 + 1 / 2) * kept["numel"] / before.elementwise_bandwidth
    assert again["backward"] - kept["backward"] == pytest.approx(copied)
    assert again["forward"] == kept["forward"]


@pytest.mark.parametrize(("share", "more"), [(0, 2319), (1, 4967), (0.5, 3643)])
def test_zero3_has_hooks_on_one_device_too_and_more_where_layers_are_recomputed(share, more):
    before = costs(8, devices=1, checkpointing=share)
    plain, hooked = layer(before), layer(zero3_hooks(before))
    kernels = 12 * LAUNCH
    assert hooked["forward"] - plain["forward"] == pytest.approx(2509e-6 + kernels)
    assert hooked["backward"] - plain["backward"] == pytest.approx(more * 1e-6 + 3 * kernels)


def test_a_step_of_zero3_waits_for_its_hooks():
    found = costs(8)
    hooked = zero3_hooks(found)
    least = hooked.forward_seconds + hooked.backward_seconds
    took = simulate(found, Strategy.of("deepspeed_zero3")).busy_seconds["device"]
    assert took > least > found.forward_seconds + found.backward_seconds + 24 * 2e-3


def test_zero3_copies_weights_out_and_gradients_into_a_bucket():
    before = costs(8192, batch_size=8)
    plain, hooked = layer(before), layer(zero3_hooks(before))
    each = plain["numel"] / before.elementwise_bandwidth
    gathered = 4 * (1 + 1 / 2)
    assert hooked["forward"] - plain["forward"] == pytest.approx(gathered * each)
    assert hooked["backward"] - plain["backward"] == pytest.approx((gathered + 8) * each)


def test_deepspeed_copies_a_bucket_flat_only_where_devices_have_parts_of_it():
    before = costs(8192, batch_size=8)
    options = {"own_bytes": 0.0, "own_kernels": 0}
    whole, cut = (
        layer(deepspeed_hooks(before, **options, bucket_elements=size))
        for size in (before.num_params // 2, before.num_params // 2 + 1)
    )
    copied = 4 * (1 + 1 / 2) * whole["numel"] / before.elementwise_bandwidth
    assert cut["backward"] - whole["backward"] == pytest.approx(copied)


def test_adamw_without_fusion_moves_its_temporaries():
    found = costs(8, devices=1)
    fused, foreach = (optimizer_seconds(found, name, 1, 4) for name in ("fused", "foreach"))
    assert fused == pytest.approx(found.num_params / found.hardware.overheads.device_update.value)
    assert foreach == pytest.approx(fused * 80 / 28)
    assert optimizer_seconds(found, "foreach", 1, 2) == pytest.approx(foreach / 2)


def test_a_small_part_of_the_model_takes_what_its_parameters_take_the_host():
    found = costs(8, devices=1)
    count = sum(segment.num_parameters for segment in found.segments)
    assert count == 24 * 12 + 2
    at_once, one_by_one = (
        optimizer_seconds(found, name, 1e6, width) for name, width in (("foreach", 2), ("loop", 4))
    )
    assert at_once == pytest.approx(count * 10.0e-6 + 8 * count / 36 * LAUNCH, rel=1e-3)
    assert one_by_one == pytest.approx(count * (19.3e-6 + 8 * LAUNCH))


def test_an_optimizer_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.*sgd.*fused"):
        simulate(costs(8), Strategy.of("ddp", optimizer="sgd"))


def test_deepspeeds_step_is_longer_than_the_papers_by_its_passes():
    found = costs(4096)
    paper = simulate(found, Strategy.of("published_on_device"))
    released = simulate(found, Strategy.of("deepspeed_zero2"))
    # 16-bit gradients of a half: 28 bytes look for what is not finite, 18 take the norm, 24 more.
    passes = found.num_params / 2 * (28 + 18 + 4 + 6 + 8 + 6) / found.elementwise_bandwidth
    assert released.update_seconds - paper.update_seconds == pytest.approx(passes)
    assert released.stall_seconds > paper.stall_seconds  # buckets are reduced in turn


def test_deepspeeds_step_with_pytorchs_adamw_moves_more():
    found = costs(4096)
    fused, loop = (
        simulate(found, Strategy.of("deepspeed_zero2", optimizer=name)).update_seconds
        for name in ("fused", "loop")
    )
    update = found.num_params / 2 / found.hardware.overheads.device_update.value
    assert loop - fused == pytest.approx((80 / 28 - 1) * update)


def test_hooks_of_modules_go_with_a_layers_matrices_where_these_are_many():
    hooks = Hooks(unit=2e-3, unit_matrices=7)
    device = costs(8).hardware.device
    few, same, experts = (hooks.host_seconds(9, count, device) for count in (4, 7, 28))
    assert few == same == pytest.approx(2e-3)
    assert experts == pytest.approx(8e-3)
