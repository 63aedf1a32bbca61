"""LoRA and QLoRA: adapters counted by hand, bits, memory as published, FLOP and limits."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.memory.need import memory_of
from sim.models.activations import Activations
from sim.models.kernels import Passes
from sim.models.shapes.parts import Parameter
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.systems.lora import Lora, Qlora, adapter_work, adapters, nf4_bytes
from sim.simulate import SYSTEMS, Strategy, simulate
from sim.timing.costs import costs_of
from tests.sim.models.live import kept_bytes
from zenflow.errors import ConfigError

MACHINE = find_machine("dgx-a100-80", 1)
LLAMA_7B = Workload.of_config(*find_model("llama-2-7b"), sequence=2048)
LINEAR = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
"""Elements of the matrices of Llama-2-7B's layers."""
LLAMA_65B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "intermediate_size": 22016,
}  # fmt: skip


def parts(work, name, **options):
    need = memory_of(work, Strategy.of(name, **options), MACHINE)
    return {p.name: p.num_bytes for p in need.parts}


def lane(work, kind=Lora, machine=MACHINE, **options):
    """Return forward and backward seconds."""
    costs = kind(Machine(machine), costs_of(work, machine), **options).costs
    return costs.forward_seconds, costs.backward_seconds


# ---- adapters and memory --------------------------------------------------------------------


def test_adapters_of_llama_2_7b():
    attention = 32 * 4 * 2 * 4096
    inner = 32 * 3 * (4096 + 11008)
    assert adapters(LLAMA_7B, 8, "attention") == 8 * attention
    assert adapters(LLAMA_7B, 64) == 64 * (attention + inner) == 159_907_840
    # PEFT's documentation and QLoRA's figure have the same for rank 64.


@pytest.mark.parametrize("model", ["gpt2", "opt-1.3b", "bert-base", "phi-4", "mixtral-8x7b"])
def test_attention_has_its_projections_in_every_family(model):
    work = Workload.of_config(*find_model(model))
    inner = next(layer for layer in work.layers if layer.is_inner)
    assert 0 < adapters(work, 1, "attention") < adapters(work, 1)
    width, keys = inner.mixer.queries, inner.mixer.keys
    projected = 2 * (work.hidden + width) + 2 * (work.hidden + keys)
    if model in ("gpt2", "phi-4"):  # queries, keys and values in one matrix
        projected = (work.hidden + width + 2 * keys) + (work.hidden + width)
    count = sum(layer.is_inner for layer in work.layers)
    assert adapters(work, 1, "attention") == count * projected


def test_enough_rank_makes_as_many_adapters_as_weights():
    square = {**LLAMA_65B, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    work = Workload.of_config("square", {**square, "num_attention_heads": 1})
    matrices = sum(p.numel for p in work.layers[1].parameters if len(p.shape) > 1)
    assert adapters(work, 32) == matrices


def test_nf4_takes_4_127_bits():
    assert 8 * nf4_bytes() == pytest.approx(4.127, abs=5e-4)  # Dettmers et al. 2023, section 3
    found = parts(LLAMA_7B, "qlora")
    assert found["quantised weights"] == pytest.approx(LINEAR * nf4_bytes())
    assert found["weights"] == 2 * (LLAMA_7B.num_params - LINEAR)
    assert parts(LLAMA_7B, "lora")["weights"] == 2 * LLAMA_7B.num_params


def test_adapters_have_16_bytes_for_each_element():
    few, many = (parts(LLAMA_7B, "lora", lora_rank=rank) for rank in (8, 16))
    names = ("adapters", "gradients", "optimizer state")
    each = sum(many[n] - few.get(n, 0.0) for n in names if n in many)
    more = adapters(LLAMA_7B, 16) - adapters(LLAMA_7B, 8)
    assert each == pytest.approx((16 if "gradients" in many else 12) * more)


def test_65b_fits_48_gb_in_4_bits_only():
    """Dettmers et al. 2023: a batch of 1 with 512 tokens, rank 64, on one GPU of 48 GB."""
    work = Workload.of_config("llama-65b", LLAMA_65B, sequence=512, checkpointing=True)
    gpu = find_machine("rtx-a6000-server", 1)
    strategies = [Strategy.of(name, lora_rank=64) for name in ("lora", "qlora")]
    needs = [memory_of(work, strategy, gpu) for strategy in strategies]
    assert [bool(need.fits(gpu)) for need in needs] == [True, False]
    assert needs[0].device_bytes > 130e9
    assert 33e9 < needs[1].device_bytes < 48 * 2**30


def test_bits_that_litgpt_measured():
    """tutorials/resource-tables.md, Llama-2-7B: scales of scales save 14.14 - 13.84 GB.

    It quantises the output layer as well.
    """
    plain = (4.0 + 32.0 / 64) / 8
    quantised = LINEAR + 32000 * 4096
    assert (plain - nf4_bytes()) * quantised / 1e9 == pytest.approx(14.14 - 13.84, abs=0.02)


def test_memory_of_litgpts_lora():
    """The same table, without quantisation: queries and values with rank 8, 1304 tokens."""
    for batch, measured in ((1, 21.30e9), (2, 29.07e9)):
        work = Workload.of_config(*find_model("llama-2-7b"), sequence=1304, batch_size=batch)
        need = memory_of(work, Strategy.of("lora", lora_rank=8, lora_targets="attention"), MACHINE)
        allocated = sum(
            p.num_bytes for p in need.parts if p.place == "device" and p.note != "estimated"
        )
        assert allocated == pytest.approx(measured, rel=0.15)


def test_fewer_targets_keep_fewer_activations():
    full = sum(Activations(LLAMA_7B).kept_bytes()[:-1])
    every = parts(LLAMA_7B, "lora", lora_rank=8)["activations"]
    some = parts(LLAMA_7B, "lora", lora_rank=8, lora_targets="attention")["activations"]
    tokens = 2 * 2048  # bytes of a value of every token
    assert every - full == 32 * tokens * 7 * 8
    assert some - full == 32 * tokens * (4 * 8 - 4096 - 11008)


class Product(torch.autograd.Function):
    """A product with a frozen matrix as bitsandbytes has it: MatMul4Bit, without quantisation."""

    @staticmethod
    def forward(ctx, a, b, keeps):
        ctx.tensors = (a if keeps else None, b)
        return functional.linear(a, b)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.tensors[1], None, None


class FeedForward(nn.Module):
    """Llama's, with a norm that keeps its input alone."""

    def __init__(self, keeps):
        super().__init__()
        shapes = ((352, 128), (352, 128), (128, 352))
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)
            for shape in shapes
        )
        self.keeps = keeps

    def forward(self, x):
        gate, up, down = self.matrices
        normed = x * 0.5
        first = functional.silu(Product.apply(normed, gate, self.keeps))
        inner = first * Product.apply(normed, up, self.keeps)
        return x + Product.apply(inner, down, self.keeps)


def test_inputs_that_products_keep_although_nothing_reads_them():
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    kept = [kept_bytes(FeedForward(keeps), x)[1] for keeps in (False, True)]
    assert kept[1] - kept[0] == 2 * 2 * 64 * (128 + 352)
    options = {"lora_rank": 8, "lora_targets": "attention"}
    found = [
        parts(LLAMA_7B, "qlora", keeps_inputs=keeps, **options)["activations"]
        for keeps in (False, True)
    ]
    assert found[1] - found[0] == 32 * 2 * 2048 * (4096 + 11008)
    every = [
        parts(LLAMA_7B, "qlora", keeps_inputs=keeps)["activations"] for keeps in (False, True)
    ]
    assert every[0] == every[1]  # all of them are adapters' inputs as well


def test_memory_of_litgpts_qlora():
    """The same table, Llama-2-7B in NF4 with quantised scales: bitsandbytes 0.41."""
    work = Workload.of_config(*find_model("llama-2-7b"), sequence=1304)
    options = {"lora_rank": 8, "lora_targets": "attention"}
    found = [
        memory_of(work, Strategy.of("qlora", keeps_inputs=keeps, **options), MACHINE)
        for keeps in (False, True)
    ]
    errors = [need.allocated_bytes / 13.84e9 - 1 for need in found]
    assert errors[0] < -0.19 < -0.12 < errors[1] < 0.0


def test_frozen_tables_get_no_gradient():
    tied = Workload.of_config(*find_model("qwen2.5-0.5b"), sequence=1)
    assert "tied table's gradients" not in parts(tied, "lora")
    assert "tied table's gradients" in parts(tied, "published_zero_offload")


# ---- time -----------------------------------------------------------------------------------


def only_products(machine=MACHINE):
    """Return a machine on which nothing takes time but products and attention."""
    free = {"device.bandwidth": 1e18, "device.launch": 1e-12, "device.backward_launch": 1e-12,
            "device.matmul_latency": 1e-15}  # fmt: skip
    return machine.with_values(free)


def test_backward_has_one_product_for_each_of_forwards():
    work, machine = replace(LLAMA_7B, sequence=512), only_products()
    forward, backward = lane(work, machine=machine, lora_rank=1)
    whole = costs_of(work, machine)
    attention = 32 * 4 * 512**2 / 2 * 4096
    rate = machine.device.attention_rate
    forward_attention = attention / rate("bfloat16", tokens=512)
    backward_attention = 2.5 * attention / rate("bfloat16", tokens=512, is_backward=True)
    products = forward - forward_attention
    assert products == pytest.approx(whole.forward_seconds - forward_attention, rel=1e-3)
    assert backward - backward_attention == pytest.approx(products, rel=2e-3)
    assert whole.backward_seconds - backward_attention == pytest.approx(2 * products, rel=2e-3)


def test_adapters_add_their_products():
    work, machine = replace(LLAMA_7B, sequence=512), only_products()
    low, high = (lane(work, machine=machine, lora_rank=rank) for rank in (100, 200))
    device = machine.device
    rate = device.flops["bfloat16"].value * device.matmul_efficiency.value
    seconds = 2 * 512 * adapters(work, 100) / (rate * device.sustained_share.value)
    assert high[0] - low[0] == pytest.approx(seconds, rel=1e-3)
    assert high[1] - low[1] == pytest.approx(2 * seconds, rel=1e-3)


def test_adapters_move_their_inputs_and_outputs_by_hand():
    """PEFT adds ``lora_B(lora_A(x)) * scaling`` to a layer's output."""
    targets = [Parameter(name="up", shape=(24, 8)), Parameter(name="down", shape=(8, 24))]
    tokens, rank = LLAMA_7B.tokens, 4
    work = adapter_work(LLAMA_7B, targets, rank)
    inputs = outputs = tokens * (24 + 8)
    assert work.matmul_flop == 2 * rank * (inputs + outputs)
    # Each product reads and writes once; between both of a target there are `rank` numbers.
    assert work.product_bytes == 2 * (inputs + outputs + 2 * 2 * tokens * rank)
    # A scaling reads and writes, a sum reads two and writes one; backward scales the gradient of
    # the output, and sums up that of the input.
    assert work.elementwise_bytes == Passes(2 * 5 * outputs, 2 * (2 * outputs + 3 * inputs))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_quantised_weights_are_unpacked_for_every_pass(checkpointing):
    work = replace(LLAMA_7B, checkpointing=checkpointing)
    plain, quantised = lane(work), lane(work, Qlora)
    rate = costs_of(work, MACHINE).elementwise_bandwidth
    once = LINEAR * (nf4_bytes() + 2 + 8 / 64) / rate
    assert quantised[0] - plain[0] == pytest.approx(once)
    assert quantised[1] - plain[1] == pytest.approx((2 if checkpointing else 1) * once)


def test_it_is_faster_than_full_training_and_says_what_it_is():
    costs = costs_of(LLAMA_7B, MACHINE)
    lora, qlora, full = (
        simulate(costs, Strategy.of(name)).step_seconds
        for name in ("lora", "qlora", "published_on_device")
    )
    assert lora < qlora < full
    assert all("not full fine-tuning" in SYSTEMS[name].rule for name in ("lora", "qlora"))


def test_devices_reduce_the_adapters_alone():
    four = find_machine("dgx-a100-80", 4)
    found = simulate(costs_of(LLAMA_7B, four), Strategy.of("lora"))
    steps = len({span.step for span in found.timeline.spans if span.lane == "fabric"})
    moved = sum(s.num_bytes for s in found.timeline.spans if s.lane == "fabric") / steps
    # A ring passes three quarters of float32 gradients, and of weights, through each of four.
    assert moved == pytest.approx(2 * 4 * adapters(LLAMA_7B, 16) * 3 / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"lora_rank": 0}, "lora_rank must be at least 1"), ({"lora_targets": "some"}, "attention")],
)
def test_bad_options_are_refused(options, said):
    strategy = Strategy.of("lora", **options)
    with pytest.raises(ConfigError, match=said):
        memory_of(LLAMA_7B, strategy, MACHINE)
    with pytest.raises(ConfigError, match=said):
        simulate(costs_of(LLAMA_7B, MACHINE), strategy)
