"""Attention's rate by kernel, pass and length, against kernels that others timed."""

from dataclasses import replace

import pytest

from sim.hardware.catalog import find_device, find_machine
from sim.models.table import find_model
from sim.models.work import Work
from sim.models.workload import Workload
from sim.timing.costs import costs_of

TERA = 1e12
FLASH_2 = {1024: 0.2414, 2048: 0.7782, 4096: 2.7797, 8192: 10.6629, 16384: 41.7995}
"""Milliseconds of forward by FlashAttention-2 for 4 sequences of so many tokens, 32 heads of 128,
causal, of a device as fast as an A100 (Dao-AILab/flash-attention 307)."""


def llama(machine, attention, sequence):
    work = Workload.of_config(
        *find_model("llama-2-7b"), batch_size=1, sequence=sequence, attention=attention
    )
    return costs_of(work, find_machine(machine, 1)).compute_seconds


def test_an_a100s_forward_is_as_long_as_flash_attention_2_took_over_every_length():
    device = find_device("a100-80-sxm")
    for tokens, milliseconds in FLASH_2.items():
        flop = 4 * 4 * 32 * 128 * tokens**2 / 2
        measured = flop / (milliseconds / 1e3)
        assert device.attention_rate("bfloat16", tokens=tokens) == pytest.approx(
            measured, rel=0.12
        )


def test_hoppers_rates_are_those_of_the_kernels_that_they_come_from():
    device = find_device("h100-sxm")
    forward = device.attention_rate("bfloat16", tokens=8192)
    backward = device.attention_rate("bfloat16", tokens=8192, is_backward=True)
    assert forward == pytest.approx(284 * TERA, rel=0.01)
    assert backward == pytest.approx(287 * TERA, rel=0.01)
    native = find_device("h200-sxm").attention_rate("bfloat16", tokens=8192, is_native=True)
    assert native == pytest.approx(521 * TERA, rel=0.02)


def test_native_kernels_are_faster_on_hopper_and_the_same_where_there_are_none():
    assert llama("hgx-h100", "native", 8192) < 0.93 * llama("hgx-h100", "fused", 8192)
    assert llama("dgx-a100-80", "native", 8192) == llama("dgx-a100-80", "fused", 8192)


@pytest.mark.parametrize("machine", ["hgx-h100", "dgx-a100-80"])
def test_the_first_flash_attention_takes_twice_as_long_and_nothing_else_does(machine):
    # Of 32 layers, heads of 32 x 128 over half of the square, forward and 2.5 times that backward.
    flop = 32 * 4 * 32 * 128 * 8192**2 / 2
    device = find_machine(machine, 1).device
    seconds = sum(
        times * flop / device.attention_rate("bfloat16", tokens=8192, is_backward=times > 1)
        for times in (1.0, 2.5)
    )
    more = llama(machine, "flash1", 8192) - llama(machine, "fused", 8192)
    assert more == pytest.approx(seconds, rel=0.02)


def test_backward_goes_by_its_own_share_and_where_there_is_none_by_forwards():
    device = find_device("a100-80-sxm")
    rates = [device.attention_rate("bfloat16", is_backward=back) for back in (False, True)]
    assert rates[1] == pytest.approx(rates[0] * 54.7 / 63.7)
    alike = replace(device, attention_backward_efficiency=None)
    assert alike.attention_rate("bfloat16", is_backward=True) == rates[0]


def test_half_the_rate_is_reached_over_the_lengths_tokens_and_none_is_lost_without_them():
    device = find_device("h100-sxm")
    half = device.attention_tokens.value
    long = device.attention_rate("bfloat16")
    assert device.attention_rate("bfloat16", tokens=half) == pytest.approx(long / 2)
    level = replace(device, attention_tokens=None)
    assert level.attention_rate("bfloat16", tokens=16) == long


def test_only_causal_fused_attention_loses_by_short_sequences():
    config = find_model("llama-2-7b")
    made = {
        name: Work(Workload.of_config(*config, sequence=512, **settings)).all()[1]
        for name, settings in {
            "causal": {},
            "whole": {"is_causal": False},
            "eager": {"attention": "eager"},
        }.items()
    }
    assert made["causal"].attention_tokens == 512
    assert made["whole"].attention_tokens == made["eager"].attention_tokens == float("inf")
