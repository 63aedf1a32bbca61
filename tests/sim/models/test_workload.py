"""What a step computes, against counts from the literature and rules for its settings."""

import itertools
from dataclasses import replace

import pytest

from sim.models.activations import Activations
from sim.models.families import num_params, read_model
from sim.models.kernels import KERNELS, Passes
from sim.models.table import find_model, model_names
from sim.models.work import Work
from sim.models.workload import Workload
from zenflow.errors import ConfigError


@pytest.mark.parametrize("name", ["llama-2-7b", "opt-6.7b", "gpt2-xl", "qwen2.5-3b"])
def test_forward_is_two_flop_for_each_weight_and_token(name):
    # Kaplan et al. 2020: 2 N, N without tables that are only looked up.
    _, config = find_model(name)
    workload = Workload.of_config(name, config, batch_size=2, sequence=128)
    flop = sum(work.matmul_flop for work in Work(workload).all())
    tables = workload.layers[0].parameters
    looked_up = sum(p.numel for p in tables if "proj" not in p.name)
    tied = (
        0 if "head" in str([p.name for p in workload.layers[-1].parameters]) else tables[0].numel
    )
    weights = num_params(config) - looked_up + tied
    assert flop / (2 * workload.tokens) == pytest.approx(weights, rel=0.002)


def test_attention_counts_pairs_of_tokens_once_when_causal():
    _, config = find_model("llama-2-7b")
    work = Work(Workload.of_config("7b", config, batch_size=3, sequence=100)).all()[1]
    assert work.attention_flop == 4 * 3 * 100 * 100 / 2 * 4096
    _, config = find_model("bert-base")
    work = Work(Workload.of_config("bert", config, batch_size=3, sequence=100)).all()[1]
    assert work.attention_flop == 4 * 3 * 100 * 100 * 768


def test_only_the_experts_that_a_token_goes_to_compute():
    _, config = find_model("mixtral-8x7b")
    workload = Workload.of_config("mixtral", config, sequence=64)
    flop = sum(work.matmul_flop for work in Work(workload).all()) / (2 * workload.tokens)
    assert 12e9 < flop < 13.2e9  # 12.9 B active parameters (Jiang et al. 2024)
    assert workload.num_params > 46e9


def assert_passes(found, expected):
    assert found.forward == pytest.approx(expected.forward)
    assert found.backward == pytest.approx(expected.backward)


def test_elementwise_bytes_of_a_plain_layer_by_hand():
    config = {
        "model_type": "gpt2", "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8,
        "vocab_size": 10, "n_inner": 16,
    }  # fmt: skip
    inner = Work(Workload.of_config("g", config, batch_size=1, sequence=2)).all()[1]
    # Products read and write (4 + 12) + (4 + 4) + (4 + 16) + (16 + 4); 2 bytes, 2 tokens.
    assert inner.product_bytes == 2 * 2 * 64
    # 10 of the width for sums and layouts, 3.2 for each norm, 2 of the inner width; twice in
    # backward, but for norms, which take 28 bytes. Two dropouts read, write, and write a byte.
    plain = Passes(2 * 2 * (10 * 4 + 2 * 3.2 * 4 + 2 * 16), 2 * 2 * 2 * (40 + 32) + 2 * 2 * 28 * 4)
    dropped = 2 * 2 * (2 + 2 + 1) * 4
    assert_passes(inner.elementwise_bytes, plain + Passes(dropped, 2 * dropped))
    undropped = Workload.of_config("g", {**config, "resid_pdrop": 0.0}, batch_size=1, sequence=2)
    assert_passes(Work(undropped).all()[1].elementwise_bytes, plain)
    assert Work(undropped).all()[1].num_kernels == inner.num_kernels - 2
    fused = Work(replace(undropped, dropouts=(True, False), kernels="compiled")).all()[1]
    assert fused == Work(replace(undropped, kernels="compiled")).all()[1]


@pytest.mark.parametrize(
    ("family", "usual"), [("gpt2", (True, True)), ("opt", (True, False)), ("bert", (True, True)),
                          ("llama", (False, False))],
)  # fmt: skip
def test_dropout_is_that_of_the_configuration_or_of_its_family(family, usual):
    configs = (find_model(name)[1] for name in model_names())
    config = next(c for c in configs if c["model_type"] == family)
    assert read_model(config).dropouts == usual
    none = {name: 0.0 for name in ("resid_pdrop", "attn_pdrop", "dropout", "hidden_dropout_prob",
                                   "attention_probs_dropout_prob")}  # fmt: skip
    assert read_model({**config, **none}).dropouts == (False, False)


@pytest.mark.parametrize("model", ["opt-350m", "bert-base", "llama-3.1-8b"])
def test_classes_have_no_output_layer_and_a_sum_no_loss(model):
    tokens, summed, classes = (
        Workload.of_config(*find_model(model), loss=loss) for loss in ("tokens", "sum", "classes")
    )
    logits = summed.tokens * summed.vocabulary
    heads = [Work(work).all()[-1] for work in (tokens, summed, classes)]
    assert heads[0].matmul_flop == heads[1].matmul_flop
    table = min(p.numel for p in tokens.parameters if tokens.vocabulary in p.shape[:1]
                and len(p.shape) > 1)  # fmt: skip
    assert heads[1].matmul_flop - heads[2].matmul_flop == 2 * tokens.tokens * table
    # Float32 logits as measured; 16-bit ones are read, and their gradient written, as for a sum.
    assert_passes(heads[0].elementwise_bytes, Passes(29 + 2, 48 + 2) * logits)
    assert_passes(heads[1].elementwise_bytes, Passes(2, 2) * logits)
    assert_passes(heads[2].elementwise_bytes, Passes())
    kept = [Activations(work).kept_bytes()[-1] for work in (tokens, summed, classes)]
    assert kept[0] - kept[1] == logits * 2
    assert kept[1] - kept[2] == logits * 2
    held = [Activations(work).loss_bytes() for work in (tokens, summed, classes)]
    assert held == [8 * logits, 2 * logits, 0]
    assert classes.num_params <= summed.num_params
    assert classes.tied_bytes() == 0


def test_an_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match=r"loss 'token' is unknown; did you mean 'tokens'"):
        Workload.of_config(*find_model("gpt2"), loss="token")


LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_elementwise_bytes_of_fused_kernels_by_hand():
    products = (8 + 8) * 2 + (8 + 4) * 2 + (8 + 24) * 3
    # 12 of queries and keys read and written once; two factors read, one written.
    rotary, gate = 2 * 12, 3 * 24
    expected = {
        "liger": Passes(2 * 2.4 * 8 + rotary + gate + 10 * 8,
                        2 * 10 * 8 + rotary + 2 * gate + 20 * 8),
        "compiled": Passes(2 * 2 * 8 + rotary + gate + 4 * 8,
                           2 * 4 * 8 + rotary + 2 * gate + 8 * 8),
    }  # fmt: skip
    logit = {"liger": Passes(3, 0), "compiled": Passes(2, 2)}
    for kernels, layer in expected.items():
        work = Work(
            Workload.of_config("l", LLAMA, batch_size=1, sequence=2, kernels=kernels)
        ).all()
        assert work[1].product_bytes == 2 * 2 * products
        assert_passes(work[1].elementwise_bytes, layer * (2 * 2))
        assert work[-1].product_bytes == 2 * 2 * (8 + 50)
        assert_passes(work[-1].elementwise_bytes, logit[kernels] * (2 * 50 * 2))


def test_a_norm_of_float32_casts_nothing():
    moved = KERNELS["eager"].rms_norm
    assert (moved.of(4), moved.of(2)) == (Passes(31, 104), Passes(46, 112))
    assert moved.of(2).backward > 2 * moved.of(2).forward


def test_fused_kernels_change_no_product_and_no_count_of_parameters():
    made = [
        Workload.of_config("l", LLAMA, kernels=name) for name in ("eager", "liger", "compiled")
    ]
    works = [Work(work).all()[1] for work in made]
    assert len({(work.matmul_flop, work.attention_flop, work.num_matmuls) for work in works}) == 1
    for one, other in itertools.pairwise(works):
        assert one.elementwise_bytes.forward > other.elementwise_bytes.forward
        assert one.elementwise_bytes.backward > other.elementwise_bytes.backward
        assert one.num_kernels > other.num_kernels


def launched(attention):
    """Return operations of a layer's forward and backward that are no views, in transformers.

    One layer's are the difference of models of one and of two.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            made = operation(*args, **(kwargs or {}))
            is_view = any(returned.alias_info for returned in operation._schema.returns)
            taken = (argument.alias_info for argument in operation._schema.arguments)
            writes = any(alias and alias.is_write for alias in taken)
            name = operation._schema.name
            self.count += (writes or not is_view) and not name.startswith(VIEWS)
            return made

    counts = []
    for layers in (1, 2):
        changes = {"num_hidden_layers": layers, "attn_implementation": attention}
        config = transformers.LlamaConfig(**{**LLAMA, **changes})
        model, tokens = transformers.LlamaForCausalLM(config).bfloat16(), torch.ones(1, 4).long()
        with Counting() as forward:
            loss = model(input_ids=tokens, labels=tokens).loss
        with Counting() as backward:
            loss.backward()
        counts.append((forward.count, backward.count))
    return [b - a for a, b in zip(*counts, strict=True)]


def counted(attention):
    work = Workload.of_config("l", LLAMA, dtype="bfloat16", attention=attention)
    return Work(work).all()[1].num_kernels


def test_compiled_eager_attention_moves_scores_four_times_and_transformers_own_ten():
    moved = {
        (kernels, attention): Work(Workload.of_config(
            "l", LLAMA, batch_size=2, sequence=64, kernels=kernels, attention=attention
        )).all()[1].elementwise_bytes
        for kernels in ("eager", "compiled")
        for attention in ("fused", "eager")
    }  # fmt: skip
    scores = 2 * 64**2 * LLAMA["num_attention_heads"]
    for kernels, passes in (("eager", 10), ("compiled", 4)):
        more = moved[kernels, "fused"] + Passes(passes, 2 * passes) * (2 * scores)
        assert_passes(moved[kernels, "eager"], more)


def test_eager_layers_launch_what_transformers_own_do():
    forward, backward = launched("sdpa")
    assert forward == pytest.approx(counted("fused"), rel=0.1)
    assert backward == pytest.approx(2 * counted("fused"), rel=0.15)


def test_eager_attention_launches_as_many_more_as_in_transformers():
    more = launched("eager")[0] - launched("sdpa")[0]
    assert counted("eager") - counted("fused") == more


VIEWS = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::detach", "aten::view")
"""Operations that launch nothing, whatever their schemas say."""


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
