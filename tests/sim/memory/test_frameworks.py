"""Memory of what PyTorch and DeepSpeed shard: closed forms, and totals in messages of failures."""

import math

import pytest

from sim.hardware.catalog import find_machine
from sim.memory.moments import fullest
from sim.memory.need import memory_of
from sim.memory_parts import (
    REDUCE_BUCKET,
    DeviceParts,
    Part,
    SystemCase,
)
from sim.models.activations import Activations
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.parallel.deepspeed_zero2 import DEEPSPEED_ZERO2
from sim.schedules.parallel.optimizer_memory import optimizer_part
from sim.simulate import Strategy
from zenflow.errors import ConfigError

GIB = 2**30


def llama(**settings):
    return Workload.of_config(*find_model("llama-2-7b"), **settings)


def need_of(name, devices=8, machine="dgx-a100-80", work=None, **options):
    # Few tokens, so that a device is fullest in the optimizer's step.
    work = work or llama(sequence=8)
    return memory_of(work, Strategy.of(name, **options), find_machine(machine, devices))


def parts_of(need, place="device"):
    return {part.name: part.num_bytes for part in need.parts if part.place == place}


def near(value):
    return pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("name", "devices"), [("ddp", 1), ("fsdp2", 8), ("fsdp2", 2)])
def test_adamw_takes_a_list_of_roots_or_two_tensors_or_nothing(name, devices):
    work = llama(sequence=8)
    part = work.num_params if name == "ddp" else work.num_params / devices
    largest = 32000 * 4096 * part / work.num_params
    needs = {kind: need_of(name, devices, optimizer=kind) for kind in ("fused", "foreach", "loop")}
    taken = {kind: parts_of(need).get("temporaries", 0.0) for kind, need in needs.items()}
    # Under FSDP2 the loop's two tensors are less than what backward holds.
    loop = 8 * largest if name == "ddp" else 0.0
    assert taken == {"fused": 0.0, "foreach": near(4 * part), "loop": near(loop)}


def test_what_layers_in_use_hold_is_not_there_in_the_step():
    device = DeviceParts(
        always=[Part("weights", "device", 3.0)],
        passes=[Part("layers in use", "device", 5e12)],
        step=[Part("temporaries", "device", 1e12)],
        in_flight=0.0,
        gradients_after=0.0,
    )
    moment, parts = fullest(llama(sequence=8), device)
    assert moment != "step"
    assert sum(part.num_bytes for part in parts if part.name == "layers in use") == 5e12
    step = DeviceParts(
        always=device.always, passes=[Part("layers in use", "device", 5.0)], step=device.step,
        in_flight=0.0, gradients_after=0.0,
    )  # fmt: skip
    moment, parts = fullest(llama(sequence=8), step)
    assert moment == "step"
    assert {part.name for part in parts} == {"weights", "gradients", "temporaries"}


def test_gradients_in_backward_lie_beside_those_of_earlier_micro_batches():
    work = llama(sequence=4096, kernels="liger", loss="classes")  # which holds nothing
    whole = sum(Activations(work).kept_bytes()[:-1])
    cases = ((5e10, 1e10, 6e10, 6e10), (5e10, 1e10, 5e10, 5e10), (0.0, 1e10, 1e9, 1e9))
    for before, in_flight, after, held in cases:
        device = DeviceParts(
            always=(), gradients_before=before, in_flight=in_flight, gradients_after=after
        )
        moment, parts = fullest(work, device)
        assert moment == "start of backward"
        found = {part.name: part.num_bytes for part in parts}
        assert (found["activations"], found["gradients"]) == (near(whole), held)


def test_a_loop_takes_two_tensors_as_large_as_a_devices_part_of_the_largest():
    case = SystemCase(
        workload=llama(), hardware=find_machine("dgx-a100-80", 8), options={"optimizer": "loop"}
    )
    assert optimizer_part(case, case.params / 8).num_bytes == near(2 * 4 * 32000 * 4096 / 8)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_offload"])
def test_embedding_and_output_layer_are_whole_throughout_or_one_of_them_at_a_time(name, prefetch):
    work = Workload.of_config(*find_model("llama-3.1-70b"), sequence=512, checkpointing=True)
    table, layer = work.layers[0].numel, work.layers[1].numel
    assert table > layer
    found = [
        parts_of(need_of(name, work=work, prefetch=prefetch, tables_apart=apart))
        for apart in (False, True)
    ]
    width = work.layers[-1].numel
    assert found[0]["layers in use"] == near(2 * (table + width + (1 + prefetch) * layer))
    assert found[1]["layers in use"] == near(2 * (width + prefetch * layer))
    # Gradients of two layers that follow one another, and what stays.
    assert found[0]["gradients"] - found[1]["gradients"] == near(2 * (2 * width - width - layer))


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("float32_reduce", [True, False])
def test_fsdp2_holds_16_bytes_of_an_element_whatever_it_reduces(devices, float32_reduce):
    need = need_of("fsdp2", devices, optimizer="foreach", float32_reduce=float32_reduce)
    own, params = parts_of(need), need.workload.num_params
    assert need.moment == "step"
    assert own["weights"] == own["gradients"] == own["temporaries"] == near(4 * params / devices)
    assert own["moments"] == near(8 * params / devices)


@pytest.mark.parametrize(("float32_reduce", "each"), [(True, 4), (False, 2)])
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_offload"])
def test_gradients_that_wait_for_the_last_micro_batch_are_whole(name, float32_reduce, each):
    work = llama(sequence=512, accumulation=8)
    options = {"float32_reduce": float32_reduce}
    waiting = need_of(name, work=work, sync_each_batch=False, **options)
    layer = max(item.numel for item in work.layers)
    assert parts_of(waiting)["gradients"] == near(each * (work.num_params + layer))
    once = llama(sequence=512)
    kept = [need_of(name, work=once, sync_each_batch=syncs, **options) for syncs in (True, False)]
    assert kept[0].device_bytes == kept[1].device_bytes
    assert need_of(name, work=work, **options).device_bytes < waiting.device_bytes - 10e9


def test_zero2_holds_what_a_message_says_when_it_fails():
    """28.28 GiB allocated, and 3.14 refused to AdamW's second temporary: LLaMA-Factory 1221."""
    work = llama(sequence=8, dtype="float16")
    need = need_of("deepspeed_zero2", machine="v100-server", work=work, optimizer="loop")
    assert need.moment == "step"
    assert need.allocated_bytes == pytest.approx((28.28 + 3.14) * GIB, rel=2e-3)


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize(
    ("optimizer", "taken"), [("fused", 4), ("foreach", 4), ("loop", 8)]
)  # casts hold gradients twice
def test_zero2s_step(devices, optimizer, taken):
    need = need_of("deepspeed_zero2", devices, optimizer=optimizer, bucket_elements=1000)
    own, share = parts_of(need), need.workload.num_params / devices
    assert need.moment == "step"
    assert "gradients" not in own
    assert own["float gradients"] == near(4 * share)
    assert own["temporaries"] == near(taken * share)
    assert own["optimizer state"] == near(12 * share)


def test_zero2s_buckets_are_there_in_backward_alone():
    found = []
    for options in ({}, {"overlap_comm": True}, {"bucket_elements": 10**8}):
        given = DEEPSPEED_ZERO2.options(options)
        machine = find_machine("dgx-a100-80", 8)
        case = SystemCase(workload=llama(), hardware=machine, options=given)
        device, _ = DEEPSPEED_ZERO2.memory(case)
        assert device.gradients_after == near(device.in_flight + 2 * case.params / 8)
        assert device.gradients_at_step == 0.0
        found.append(device.in_flight)
    layers = 2 * max(layer.numel for layer in llama().layers)  # this one and the one before it
    assert found[0] == near(2 * (layers + REDUCE_BUCKET))
    assert found[1] == near(2 * (layers + 2 * REDUCE_BUCKET))
    assert found[2] == near(2 * (10**8 + 10**8))


@pytest.mark.parametrize(("optimizer", "taken"), [("fused", 2), ("foreach", 4), ("loop", 8)])
@pytest.mark.parametrize("group", [10**8, 10**9])
def test_zero3_updates_a_sub_group_at_a_time(optimizer, taken, group):
    need = need_of("deepspeed_zero3", 2, optimizer=optimizer, sub_group_elements=group)
    own, share = parts_of(need), need.workload.num_params / 2
    assert own["weights"] == own["gradient buffer"] == near(2 * share)
    assert own["optimizer state"] == near(12 * share)
    assert own["reduction buckets"] == 2 * REDUCE_BUCKET
    if need.moment == "step":
        assert own["float gradients"] == near(4 * group)
        assert own["temporaries"] == near(taken * group)
    assert (need.moment == "step") == (group == 10**9)


def test_zero3_keeps_what_it_uses_again_soon():
    work = llama(sequence=8)
    need = need_of("deepspeed_zero3", work=work, sub_group_elements=1, bucket_elements=1000)
    layer = max(item.numel for item in work.layers)
    assert parts_of(need)["layers in use"] == near(2 * (500_000_000 + layer + 50_000_000))
    small = Workload.of_config(*find_model("qwen2.5-0.5b"), sequence=8)
    need = need_of("deepspeed_zero3", work=small, sub_group_elements=1, bucket_elements=1000)
    assert parts_of(need)["layers in use"] == near(2 * small.num_params)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_zero3_with_offload(offload):
    need = need_of("deepspeed_zero3", offload=offload)
    own, params = parts_of(need), need.workload.num_params
    assert own.get("weights", 0.0) == near(2 * params / 8 if offload == "optimizer" else 0.0)
    assert not {"optimizer state", "float gradients", "temporaries"} & set(own)
    host = {**parts_of(need, "pageable"), **parts_of(need, "pinned")}
    assert host["optimizer state"] == near(12 * params)
    assert host["float gradients"] == near(4 * params)
    assert host["gradients"] == near(2 * params)
    assert ("weights to upload" in host) == (offload == "all")


def test_pinned_gradients_of_zero3_are_rounded_up_by_sub_group():
    def rounding(**options):
        need = need_of("deepspeed_zero3", offload="optimizer", **options)
        return parts_of(need, "pinned")["rounding of float gradients"] / 8

    share = 4 * need_of("deepspeed_zero3").workload.num_params / 8
    assert rounding() == near(2 ** math.ceil(math.log2(share)) - share)
    assert rounding(sub_group_elements=2**20) == near(
        2 ** math.ceil(math.log2(share % 2**22)) - share % 2**22
    )
    whole = 10**6  # a buffer of 4 MB takes 4 MiB
    assert rounding(sub_group_elements=whole) >= (2**22 - 4 * whole) * (share // (4 * whole))


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_an_optimizer_that_there_is_not_is_refused(name):
    with pytest.raises(ConfigError, match="optimizer"):
        need_of(name, optimizer="sgd")
