"""What a step computes, against counts from the literature and rules for its settings."""

import pytest

from sim.models.families import num_params
from sim.models.table import find_model
from sim.models.workload import Workload
from zenflow.errors import ConfigError


@pytest.mark.parametrize("name", ["llama-2-7b", "opt-6.7b", "gpt2-xl", "qwen2.5-3b"])
def test_forward_is_two_flop_for_each_weight_and_token(name):
    # Kaplan et al. 2020: 2 N, N without tables that are only looked up.
    _, config = find_model(name)
    workload = Workload.of_config(name, config, batch_size=2, sequence=128)
    flop = sum(work.matmul_flop for work in workload.works())
    tables = workload.layers[0].parameters
    looked_up = sum(p.numel for p in tables if "proj" not in p.name)
    tied = (
        0 if "head" in str([p.name for p in workload.layers[-1].parameters]) else tables[0].numel
    )
    weights = num_params(config) - looked_up + tied
    assert flop / (2 * workload.tokens) == pytest.approx(weights, rel=0.002)


def test_attention_counts_pairs_of_tokens_once_when_causal():
    _, config = find_model("llama-2-7b")
    work = Workload.of_config("7b", config, batch_size=3, sequence=100).works()[1]
    assert work.attention_flop == 4 * 3 * 100 * 100 / 2 * 4096
    _, config = find_model("bert-base")
    work = Workload.of_config("bert", config, batch_size=3, sequence=100).works()[1]
    assert work.attention_flop == 4 * 3 * 100 * 100 * 768


def test_only_the_experts_that_a_token_goes_to_compute():
    _, config = find_model("mixtral-8x7b")
    workload = Workload.of_config("mixtral", config, sequence=64)
    flop = sum(work.matmul_flop for work in workload.works()) / (2 * workload.tokens)
    assert 12e9 < flop < 13.2e9  # 12.9 B active parameters (Jiang et al. 2024)
    assert workload.num_params > 46e9


def test_elementwise_bytes_of_a_plain_layer_by_hand():
    config = {
        "model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8,
        "vocab_size": 10, "n_inner": 16,
    }  # fmt: skip
    inner = Workload.of_config("g", config, batch_size=1, sequence=2).works()[1]
    # Products read and write (4 + 12) + (4 + 4) + (4 + 16) + (16 + 4); 10 of the width for sums
    # and layouts, 4 for norms, 2 of the inner width; 2 bytes, 2 tokens.
    assert inner.elementwise_bytes == 2 * 2 * (64 + 10 * 4 + 4 * 4 + 2 * 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"sequence": 1.5}, "sequence must be a whole number"),
        ({"accumulation": -2}, "accumulation must be"),
        ({"dtype": "bf16"}, "dtype 'bf16' is unknown; did you mean 'bfloat16'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Workload.of_config(*find_model("gpt2"), **settings)
