"""A step's costs: hand-made figures, and sums that must come out."""

import math
from dataclasses import replace

import pytest

from sim.hardware.catalog import find_machine
from sim.hardware.quantity import Quantity
from sim.models.kernels import Passes
from sim.models.table import find_model
from sim.models.work import LayerWork
from sim.models.workload import Workload
from sim.timing.costs import costs_of, layer_seconds
from sim.timing.phases import costs_of_phases
from sim.timing.segments import SEGMENT_FLOOR, Segment, cut
from zenflow.errors import ConfigError


def figure(value):
    return Quantity(value=value, kind="spec", source="test")


def device(**changes):
    gpu = find_machine("dgx-a100-80", 1).device
    plain = {
        "flops": {"bfloat16": figure(100.0)},
        "matmul_efficiency": figure(0.5),
        "sustained_share": None,
        "attention_backward_efficiency": None,
        "attention_efficiency": figure(0.25),
        "bandwidth": figure(10.0),
        "bandwidth_efficiency": figure(1.0),
        "launch": figure(1e-12),
        "backward_launch": None,
        "compiled_launch": None,
        "matmul_latency": figure(1e-12),
        "is_cpu": False,
        "cache": None,
    }
    return replace(gpu, **{**plain, **changes})


WORK = LayerWork(
    matmul_flop=100.0,
    num_matmuls=2,
    attention_flop=50.0,
    elementwise_bytes=Passes(30.0, 60.0),
    weight_bytes=1.0,
    num_kernels=4,
)


def test_a_layer_takes_its_products_attention_and_bytes():
    # 100 FLOP at 50/s, 50 at 25/s, 30 bytes at 10/s, 60 in backward; products twice, attention
    # 2.5 times.
    forward, backward = layer_seconds(WORK, device(), "bfloat16")
    assert forward == pytest.approx(2 + 2 + 3)
    assert backward == pytest.approx(4 + 5 + 6)


def test_products_sustain_a_share_of_the_best_ones_rate():
    assert layer_seconds(WORK, device(sustained_share=figure(0.8)), "bfloat16") == (
        pytest.approx(2 / 0.8 + 2 + 3),
        pytest.approx(4 / 0.8 + 5 + 6),
    )


def test_plain_float32_products_have_a_share_of_their_own():
    both = {"bfloat16": figure(100.0), "float32": figure(20.0)}
    own = device(flops=both, float32_efficiency=figure(0.8), sustained_share=figure(0.9))
    assert own.product_rate("float32") == pytest.approx(20 * 0.8 * 0.9)
    assert own.product_rate("bfloat16") == pytest.approx(100 * 0.5 * 0.9)
    alike = device(flops=both, float32_efficiency=None)
    assert alike.product_rate("float32") == pytest.approx(20 * 0.5)
    # 100 FLOP at 16/s, 50 of attention at a quarter of 20/s, 30 bytes at 10/s.
    forward, _ = layer_seconds(WORK, replace(own, sustained_share=None), "float32")
    assert forward == pytest.approx(100 / 16 + 50 / 5 + 3)


@pytest.mark.parametrize(
    ("tensor", "read"), [(1.0, 0.0), (5.0, 0.0), (7.5, 0.5), (10.0, 1.0), (math.inf, 1.0)]
)
def test_a_large_cache_serves_reads_of_tensors_that_fit(tensor, read):
    # 30 bytes at 10/s, half of them reads; a tensor of half the cache still fits beside another.
    work = replace(WORK, tensor_bytes=tensor)
    forward, backward = layer_seconds(work, device(cache=figure(10.0)), "bfloat16")
    assert forward == pytest.approx(2 + 2 + 1.5 + 1.5 * read)
    assert backward == pytest.approx(4 + 5 + 3 + 3 * read)
    assert layer_seconds(work, device(), "bfloat16")[0] == pytest.approx(2 + 2 + 3)


def test_attentions_backward_may_have_a_rate_of_its_own():
    slower = device(attention_backward_efficiency=figure(0.2))
    forward, backward = layer_seconds(WORK, slower, "bfloat16")
    assert forward == pytest.approx(2 + 2 + 3)
    assert backward == pytest.approx(4 + 2.5 * 50 / 20 + 6)


def test_each_product_pays_its_latency_and_weights_bound_it_from_below():
    forward, _ = layer_seconds(WORK, device(matmul_latency=figure(0.5)), "bfloat16")
    assert forward == pytest.approx(2 + 2 * 0.5 + 2 + 3)
    heavy = replace(WORK, weight_bytes=100.0)  # 10 s of reading weights, for 2 s of FLOP
    forward, _ = layer_seconds(heavy, device(), "bfloat16")
    assert forward == pytest.approx(10 + 2 + 3)


def test_activations_of_products_hide_behind_their_flop_or_bind():
    # Weights and activations take 0.1 s and 1.8 s of the memory's time, for 2 s of FLOP.
    hidden = layer_seconds(replace(WORK, product_bytes=18.0), device(), "bfloat16")
    assert hidden == layer_seconds(WORK, device(), "bfloat16")
    bound = replace(WORK, product_bytes=39.0, tensor_bytes=1.0)
    forward, backward = layer_seconds(bound, device(), "bfloat16")
    assert (forward, backward) == (pytest.approx(4 + 2 + 3), pytest.approx(8 + 5 + 6))
    cached, _ = layer_seconds(bound, device(cache=figure(10.0)), "bfloat16")
    assert cached == pytest.approx(0.1 + 3.9 / 2 + 2 + 1.5)


def test_launches_bound_a_gpu_and_add_to_a_cpu():
    slow = {"launch": figure(10.0)}
    assert layer_seconds(WORK, device(**slow), "bfloat16") == (40.0, 80.0)
    forward, backward = layer_seconds(WORK, device(**slow, is_cpu=True), "bfloat16")
    assert (forward, backward) == (pytest.approx(47.0), pytest.approx(95.0))
    quick = device(**slow, is_cpu=True, backward_launch=figure(1.0))
    assert layer_seconds(WORK, quick, "bfloat16")[1] == pytest.approx(15 + 8)


def test_compiled_layers_launch_at_a_cost_of_their_own():
    made = device(launch=figure(10.0), backward_launch=figure(8.0), compiled_launch=figure(4.0))
    assert layer_seconds(WORK, made, "bfloat16") == (40.0, 64.0)
    assert layer_seconds(WORK, made, "bfloat16", is_compiled=True) == (16.0, 32.0)


def test_backwards_factor_and_gradients_memory():
    made = device(backward_factor=figure(0.5), gradient_bandwidth=figure(0.25))
    assert layer_seconds(WORK, made, "bfloat16")[1] == pytest.approx(15 / 2 + 4)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="no peak for float32: it has bfloat16"):
        layer_seconds(WORK, device(), "float32")


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen2.5-0.5b", "gpt2", "opt-1.3b"])
def test_segments_hold_every_parameter_once(name):
    workload = Workload.of_config(*find_model(name), sequence=512)
    costs = costs_of(workload, find_machine("hgx-h200", 1))
    assert costs.num_params == workload.num_params
    assert costs.compute_seconds == costs.forward_seconds + costs.backward_seconds


def test_checkpointing_adds_a_forward_of_the_inner_layers():
    model = find_model("llama-2-7b")
    hardware = find_machine("hgx-h200", 1)
    plain, again = (
        costs_of(Workload.of_config(*model, checkpointing=c), hardware) for c in (False, True)
    )
    inner = sum(s.forward for s in plain.segments if s.name.startswith("layers"))
    assert again.forward_seconds == plain.forward_seconds
    assert again.backward_seconds == pytest.approx(plain.backward_seconds + inner)


def test_a_small_models_layers_are_cut_and_nothing_is_lost():
    one = Segment(
        name="layer",
        forward=6.0,
        backward=12.0,
        matrices=((200, 200), (100, 200), (50, 200), (50, 200)),
        vectors=7,
    )
    pieces = cut([one])
    assert [piece.matrices for piece in pieces] == [((200, 200),), ((100, 200),), ((50, 200),) * 2]
    assert sum(piece.numel for piece in pieces) == one.numel
    assert [piece.forward for piece in pieces] == pytest.approx([40 / 80 * 6, 1.5, 1.5])
    assert sum(piece.backward for piece in pieces) == pytest.approx(12.0)
    assert all(piece.numel >= SEGMENT_FLOOR for piece in pieces)


def test_phases_come_back_as_they_went_in():
    costs = costs_of_phases(
        forward=1.0, backward=2.0, d2h=3.0, update=4.0, h2d=5.0, num_params=10_000_000
    )
    assert costs.forward_seconds == pytest.approx(1.0)
    assert costs.backward_seconds == pytest.approx(2.0)
    model_bytes = costs.num_params * 2
    assert model_bytes / costs.hardware.link.d2h.value == pytest.approx(3.0, rel=1e-3)
    assert model_bytes / costs.hardware.link.h2d.value == pytest.approx(5.0, rel=1e-3)
    host = costs.hardware.host.core_bandwidth.value
    assert costs.num_params * 28 / host == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update": 0.0}, "update must be a positive number of seconds, got 0.0"),
        ({"d2h": float("nan")}, "d2h must be a positive number"),
        ({"intake": -1.0}, "intake must be a number of seconds >= 0"),
        ({"num_params": 10}, "num_params must be at least 64 for each"),
    ],
)
def test_phases_that_make_no_sense_are_refused(changes, message):
    good = {"forward": 1.0, "backward": 2.0, "d2h": 3.0, "update": 4.0, "h2d": 5.0}
    with pytest.raises(ConfigError, match=message):
        costs_of_phases(**{**good, "num_params": 10_000_000, **changes})
