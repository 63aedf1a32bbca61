"""Recomputation by operation: against torch's own checkpoints, and by hand."""

from collections import defaultdict
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sim.hardware.catalog import find_machine
from sim.machine import Machine
from sim.memory.moments import fullest
from sim.memory.need import memory_of
from sim.memory_parts import DeviceParts
from sim.models.activations import Activations
from sim.models.table import find_model
from sim.models.work import Work
from sim.models.workload import Workload
from sim.schedules.systems.lora import Lora
from sim.simulate import Strategy
from sim.timing.costs import costs_of, layer_seconds
from tests.sim.models.live import Watch, kept_bytes
from zenflow.errors import ConfigError

BATCH, SEQUENCE, WIDTH, INNER, HEADS, GROUPS = 2, 64, 128, 352, 8, 2
HEAD = WIDTH // HEADS
KEYS = GROUPS * HEAD
TOKENS = BATCH * SEQUENCE
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": 3, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
}  # fmt: skip


def small(**settings):
    return Workload.of_config("small", CONFIG, batch_size=BATCH, sequence=SEQUENCE, **settings)


def llama(name="llama-3.1-8b", **settings):
    settings.setdefault("checkpointing", "op")
    return Workload.of_config(*find_model(name), sequence=8192, **settings)


# ---- torch ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Llama's layer in bfloat16, as torchtitan has it."""

    def __init__(self):
        super().__init__()
        shapes = {
            "q": (WIDTH, WIDTH), "k": (WIDTH, KEYS), "v": (WIDTH, KEYS), "o": (WIDTH, WIDTH),
            "gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH),
        }  # fmt: skip
        for name, (into, out) in shapes.items():
            setattr(self, name, nn.Linear(into, out, bias=False, dtype=torch.bfloat16))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        normed = self.norms[0](x)
        q, k, v = (
            getattr(self, name)(normed).view(BATCH, SEQUENCE, -1, HEAD).transpose(1, 2)
            for name in "qkv"
        )
        k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
        q, k = q * 1.5, k * 1.5  # in place of positions
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).reshape(x.shape))
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def torchtitans(module, x):
    """Run a layer under torchtitan's policy: attention and every second product are kept."""
    kept = {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    counts = defaultdict(int)

    def policy(ctx, func, *args, **kwargs):
        if func == torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
            if counts[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(module, x, use_reentrant=False, context_fn=contexts)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return torchtitans(self.inner, x)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def test_a_layer_keeps_what_torch_keeps(x):
    # Of each token and head attention keeps 4 bytes more, which are not counted.
    _, kept = kept_bytes(Checkpointed(), x, least=4 * TOKENS * HEADS)
    assert kept == 2 * TOKENS * (WIDTH + WIDTH + KEYS + INNER + WIDTH)
    found = Activations(small(checkpointing="op")).kept_bytes()[1]
    assert found == kept + x.nbytes


def test_backward_computes_again_what_torch_does(x):
    module = Checkpointed()
    out = module(x)
    with Watch() as watch:
        out.sum().backward()
    plain = Block()
    rest = plain(x)
    with Watch() as without:
        rest.sum().backward()
    again = list(watch.products)
    for shape in without.products:
        again.remove(shape)
    assert sorted(again) == sorted(
        [(TOKENS, WIDTH, KEYS), (TOKENS, WIDTH, WIDTH), (TOKENS, WIDTH, INNER)]
    )
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default not in (
        watch.operations
    )
    first, work, last = (Work(small(checkpointing="op")).again()[index] for index in (0, 1, -1))
    assert first is last is None
    assert work.num_matmuls == len(again)
    assert work.matmul_flop == sum(2 * rows * into * out for rows, into, out in again)
    assert work.attention_flop == 0


# ---- by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["eager", "liger", "compiled"])
def test_what_llama_3_keeps(kernels):
    kept = Activations(llama(kernels=kernels)).kept_bytes()[1:-1]
    width, keys, inner = 4096, 1024, 14336
    last = 0 if kernels == "compiled" else width  # nothing reads it
    assert set(kept) == {2 * 8192 * (width + width + keys + width + inner + last)}


def test_a_layer_with_joined_matrices_keeps_two_products_and_computes_one_again():
    work = llama("phi-4")
    width, joined, inner = 5120, 5120 + 2 * 1280, 2 * 17920
    assert Activations(work).kept_bytes()[1] == 2 * 8192 * (width + width + joined + inner)
    assert Work(work).again()[1].matmul_flop == 2 * 8192 * width * width


@pytest.mark.parametrize("kernels", ["eager", "liger", "compiled"])
def test_a_layer_in_backward_is_whole_once(kernels):
    """Beside what it computes again there is what it has kept, and nothing twice."""
    whole = Activations(llama(kernels=kernels, checkpointing=False)).kept_bytes()[1]
    work = llama(kernels=kernels)
    kept, token = Activations(work).kept_bytes()[1], 2 * 8192
    unread = 0 if kernels == "compiled" else token * 4096
    own_input = token * 4096 if kernels == "eager" else 0  # others' norms read it
    assert Activations(work).recomputed_bytes() == whole - (kept - unread) + own_input
    device = DeviceParts(always=(), in_flight=0.0, gradients_after=1e15)
    _, parts = fullest(work, device)
    found = {part.name: part.num_bytes for part in parts}
    assert found["activations"] + found["recomputed layer"] == whole + unread + own_input


def test_time_is_that_of_what_is_computed_again():
    machine = find_machine("dgx-a100-80", 1)
    none, some, every = (
        costs_of(llama(checkpointing=kind), machine) for kind in (False, "op", True)
    )
    assert none.forward_seconds == some.forward_seconds
    assert none.backward_seconds < some.backward_seconds < every.backward_seconds
    again = Work(llama()).again()[1]
    width, keys, inner = 4096, 1024, 14336
    assert again.matmul_flop == 2 * 8192 * width * (keys + width + inner)
    assert again.weight_bytes == 2 * width * (keys + width + inner)
    each = layer_seconds(again, machine.device, "bfloat16")[0]
    assert some.backward_seconds == pytest.approx(none.backward_seconds + 32 * each)
    launched = [sum(part.launching[1] for part in costs.segments) for costs in (none, some)]
    kernels = again.num_kernels * machine.device.launch.value
    assert launched[1] == pytest.approx(launched[0] + 32 * kernels)


def test_elementwise_work_is_computed_again_whole_and_products_in_part():
    work = llama()
    again, whole = Work(work).again()[1], Work(work).all()[1]
    width, keys, inner = 4096, 1024, 14336
    spared = [width + width, width + keys, width + inner, inner + width]  # q, v, gate, down
    assert again.elementwise_bytes == whole.elementwise_bytes
    assert whole.product_bytes - again.product_bytes == 2 * 8192 * sum(spared)
    assert whole.num_kernels - again.num_kernels == len(spared)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("llama-3.1-8b", {"attention": "eager"}, "take attention 'fused'"),
        ("opt-1.3b", {}, "Llama's family without experts"),
        ("mixtral-8x7b", {}, "Llama's family without experts"),
    ],
)
def test_what_has_no_such_operations_is_refused(name, settings, said):
    with pytest.raises(ConfigError, match=said):
        llama(name, **settings)


def test_adapters_refuse_it():
    machine = find_machine("dgx-a100-80", 1)
    with pytest.raises(ConfigError, match=r"adapters have their own.*share of the layers"):
        Lora(Machine(machine), costs_of(llama(), machine))
    with pytest.raises(ConfigError, match="adapters have their own"):
        memory_of(llama(), Strategy.of("qlora"), machine)
