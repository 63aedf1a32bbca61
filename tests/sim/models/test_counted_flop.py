"""FLOP of forward are those that torch counts in transformers' own modules."""

import contextlib
import logging

import pytest

from sim.models.shapes.hybrids import HYBRIDS
from sim.models.work import Work
from sim.models.workload import Workload
from tests.sim.models.small_configs import CONFIGS

RECURRENT = {*HYBRIDS}
OTHERS = {
    # Transformers computes every expert for every token (Llama4TextExperts); trainers do not.
    "llama4_text",
    # Its indexer is given no width of rotary positions by these sizes.
    "deepseek_v32",
    # Texts alone pass the layers by that attend to pictures.
    "mllama_text_model",
}
LESS = {"gemma3n_text": 0.04, "glm_moe_dsa": 0.015}
"""Families of which more is left out: AltUp's products of 4 x 4, and an indexer's weights."""
STATES = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def counted(kind, config, sequence):
    """Return the FLOP of products that torch counts in a forward."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    made = transformers.AutoConfig.for_model(kind, **config)
    # Attention by products, which are counted, and experts one by one, for their own tokens.
    made._attn_implementation = made._experts_implementation = "eager"
    family = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    logging.disable(logging.WARNING)  # kernels that are not installed
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.NOTSET)
        model = getattr(transformers, family).from_config(made, attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        count = stack.enter_context(FlopCounterMode(display=False))
        stack.enter_context(torch.no_grad())
        model(input_ids=torch.arange(sequence)[None] % 90, use_cache=False)
    return count.get_total_flops()


def predicted(kind, config, sequence):
    work = Workload.of_config(
        kind, {"model_type": kind, **config}, sequence=sequence, attention="eager", dtype="float32"
    )
    return sum(layer.matmul_flop + layer.attention_flop for layer in Work(work).all())


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - RECURRENT - OTHERS))
def test_products_and_attention_are_counted_to_a_thousandth(kind):
    config = CONFIGS[kind][0]
    expected = pytest.approx(counted(kind, config, 24), rel=LESS.get(kind, 1e-3))
    assert predicted(kind, config, 24) == expected


@pytest.mark.parametrize("kind", sorted(RECURRENT))
def test_recurrences_are_counted_to_a_quarter(kind):
    """Transformers' own form of a scan has other products than the kernels."""
    config = {**CONFIGS[kind][0]}
    config |= {name: size for name, size in STATES.items() if name in config}
    assert predicted(kind, config, 512) == pytest.approx(counted(kind, config, 512), rel=0.25)


def test_a_mixture_computes_the_experts_that_were_chosen_alone():
    kind, config = "mixtral", CONFIGS["mixtral"][0]
    all_of_them = {**config, "num_experts_per_tok": config["num_local_experts"]}
    assert predicted(kind, all_of_them, 24) > predicted(kind, config, 24)
    assert predicted(kind, all_of_them, 24) == pytest.approx(counted(kind, all_of_them, 24))


def test_a_window_leaves_each_token_that_many_pairs():
    config = {"model_type": "mistral", **CONFIGS["mistral"][0]}

    def pairs(sequence, window, **settings):
        work = Workload.of_config(
            "m", {**config, "sliding_window": window}, sequence=sequence, **settings
        )
        (layer,) = {layer.attention_flop for layer in Work(work).all()[1:-1]}
        return layer / (2.0 * 2 * 48)

    assert pairs(100, None) == pairs(100, 100) == pairs(100, 1000) == 100**2 / 2
    assert pairs(100, 10) == 10 * (100 - 10 / 2)  # all but the first ten have ten
    assert pairs(100, 10, attention="eager") == 100**2
    inner = Work(Workload.of_config("m", {**config, "sliding_window": 10}, sequence=100)).all()[1]
    assert inner.attention_tokens == 20  # of a whole causal sequence with as many pairs a token
