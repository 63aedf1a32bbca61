"""AdamW without float32 masters: bytes of a real one in bfloat16, and of every part."""

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sim.hardware.catalog import find_machine
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.planning.rules import rule_of
from sim.simulate import Strategy
from zenflow.errors import ConfigError

LLAMA_7B = Workload.of_config(*find_model("llama-2-7b"), sequence=8)
PARAMS = LLAMA_7B.num_params
KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


def need_of(name, devices=1, work=LLAMA_7B, **options):
    strategy = Strategy.of(name, **options)
    return memory_of(work, strategy, find_machine("dgx-a100-80", devices))


def parts_of(need, *places):
    return {part.name: part.num_bytes for part in need.parts if part.place in places}


def near(value):
    return pytest.approx(value, rel=1e-6)


class NewTensors(TorchDispatchMode):
    """Adds up the bytes of new tensors larger than numbers, by operation."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = found if isinstance(found, (list, tuple)) else [found]
        if not str(func.overloadpacket).endswith("_"):
            name = str(func.overloadpacket).removeprefix("aten.")
            size = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.ndim)
            self.made[name] = self.made.get(name, 0) + size
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_a_real_adamw_in_bfloat16(kind):
    work = Workload.of_config("mini", dict(
        model_type="llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, vocab_size=4096,
    ), sequence=1)  # fmt: skip
    params = [torch.nn.Parameter(torch.ones(p.shape).bfloat16()) for p in work.parameters]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params, **KINDS[kind])
    optimizer.step()
    with NewTensors() as second:
        optimizer.step()
    own = parts_of(need_of("ddp", work=work, optimizer=kind, float32_master=False), "device")
    assert own["weights"] == sum(param.nbytes for param in params)
    assert own["gradients"] == sum(param.grad.nbytes for param in params)
    states = optimizer.state.values()
    moments = sum(each[name].nbytes for each in states for name in ("exp_avg", "exp_avg_sq"))
    assert own["optimizer state"] == moments
    if kind == "foreach":
        assert own["temporaries"] == second.made["_foreach_sqrt"]
    elif kind == "loop":  # of the largest parameter alone
        largest = max(param.numel() for param in params) / work.num_params
        made = second.made["sqrt"] + second.made["div"]
        assert own["temporaries"] == near(largest * made)
    else:
        assert "temporaries" not in own
        assert not sum(second.made.values())


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", (16, 8)), ("float32", (16, 16))])
@pytest.mark.parametrize(("name", "devices"), [("ddp", 1), ("ddp", 2), ("fsdp2", 2)])
def test_bytes_of_an_element_on_a_device(name, devices, dtype, each):
    work = Workload.of_config(*find_model("llama-2-7b"), sequence=8, dtype=dtype)
    share = devices if name == "fsdp2" else 1
    for is_wide, expected in zip((True, False), each, strict=True):
        need = need_of(name, devices, work, optimizer="foreach", float32_master=is_wide)
        own = parts_of(need, "device")
        held = ("weights", "gradients", "optimizer state", "moments")
        assert sum(own.get(part, 0.0) for part in held) == near(expected * PARAMS / share)
        width = 4 if is_wide else work.dtype_bytes
        assert own["temporaries"] == near(width * PARAMS / share)


def test_bytes_of_an_element_on_the_host():
    for is_wide, width in ((True, 4), (False, 2)):
        need = need_of("fsdp2_offload", 8, float32_master=is_wide)
        host = parts_of(need, "pinned", "pageable")
        assert host["weights"] == host["gradients"] == near(width * PARAMS)
        assert host["moments"] == near(2 * width * PARAMS)
        arriving = 2 * width * max(layer.numel for layer in LLAMA_7B.layers) / 8
        assert parts_of(need, "device")["weights on their way"] == near(arriving)


def test_torchaos_offload_casts_nothing():
    need = need_of("torchao_offload")
    host = parts_of(need, "pinned", "pageable")
    assert host["weights"] == host["gradients"] == near(2 * PARAMS)
    assert host["moments"] == near(4 * PARAMS)
    wide = need_of("superoffload", ratio=1.0)
    assert wide.allocated_bytes > need.allocated_bytes  # gradients are cast on the device
    half = parts_of(need_of("superoffload", ratio=0.5, float32_master=False), "device")
    assert half["optimizer state"] == near(4 * PARAMS / 2)


def test_a_rule_says_that_there_are_no_masters():
    for name, options, words in (
        ("ddp", {}, "AdamW exactly"),
        ("ddp", {"float32_master": False}, "AdamW, without float32 masters"),
        ("torchao_offload", {}, "AdamW, without float32 masters"),
        ("adamw_8bit", {}, "AdamW with moments in 8 bits, without float32 masters"),
        ("adamw_8bit", {"float32_master": True}, "AdamW with moments in 8 bits"),
    ):
        assert rule_of(Strategy.of(name, **options)) == words


@pytest.mark.parametrize("name", ["zenflow", "on_device"])
def test_the_engine_always_has_masters(name):
    with pytest.raises(ConfigError, match=r"always has float32 masters.*take ddp"):
        Strategy.of(name, float32_master=False)
