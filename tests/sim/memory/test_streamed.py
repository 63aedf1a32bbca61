"""Memory of streamed weights: the engine's own bytes, and what a card is spared."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sim.hardware.catalog import find_machine
from sim.memory.engine import engine_memory
from sim.memory.engine_parts import Visiting
from sim.memory.need import memory_of
from sim.models.table import find_model
from sim.models.workload import Workload
from sim.schedules.streams import Streams
from sim.simulate import Strategy
from zenflow import ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.device.cpu import CpuDevice

SHAPE = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip


RULES = {
    "k 0": {"topk_ratio": 0},
    "important columns": {"topk_ratio": 0.25},
    "no overlap": {"topk_ratio": 0.25, "overlap_step": False},
    "warm-up": {"topk_ratio": 0, "full_warm_up_rounds": 2},
    "published": {"topk_ratio": 0.1, "update_rule": "published"},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("resident", "accumulation"), [(0, 1), (2, 2)])
def test_bytes_are_the_engines(rule, resident, accumulation, monkeypatch):
    monkeypatch.setattr(CpuDevice, "has_ring", True)  # it allocates what a GPU's engine does
    config = ZenFlowConfig(**RULES[rule])
    model = LlamaForCausalLM(SHAPE).to(torch.bfloat16)
    stream = stream_weights(model, "cpu", resident_layers=resident)
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, offload_gradients="release",
        accumulation_steps=accumulation,
    )  # fmt: skip
    memory = optimizer.memory
    buckets = optimizer._engine.layout.buckets
    largest = max(sum(s.num_rows * s.num_columns for s in bucket.splits) for bucket in buckets)
    shapes = [tuple(p.shape) for p in model.parameters()]
    optimizer.close()
    stream.close()
    workload = Workload.of_config("tiny", SHAPE.to_dict(), accumulation=accumulation)
    found = Visiting.of(workload, Streams(resident_layers=resident))
    sums = found.at_home if accumulation > 1 else 0
    assert memory.home_bytes == found.at_home + sums
    assert memory.model_bytes == 2 * workload.num_params - found.at_home + found.on_device
    own = engine_memory(shapes, config, 2)
    plain, homes = own.plan(has_ring=True), memory.home_bytes
    assert memory == replace(
        plain,
        model_bytes=memory.model_bytes,
        home_bytes=homes,
        host_bytes=plain.host_bytes + homes,
        pinned_bytes=plain.pinned_bytes + homes,
    )
    assert own.bucket >= largest  # buckets end where layers do


def need(**streams):
    machine = find_machine("rtx4090-desktop", 1)
    workload = Workload.of_config(
        *find_model("qwen3-14b"), batch_size=4, sequence=1024, checkpointing=True, accumulation=2
    )
    strategy = Strategy.of(
        "zenflow", topk_ratio=0, streams=Streams(**streams) if streams else None
    )
    return memory_of(workload, strategy, machine), workload


def test_a_card_is_spared_what_visits():
    (plain, workload), (streamed, _) = need(), need(slots=3)
    visiting = Visiting.of(workload, Streams(slots=3))
    kept = {part.name: part.num_bytes for part in streamed.parts}
    assert kept["streamed weights"] == kept["gradients' sums"] == visiting.at_home
    assert kept["weights"] + visiting.at_home == 2 * workload.num_params
    assert plain.device_bytes > 40e9
    assert streamed.device_bytes < 22e9
    more, _ = need(slots=3, resident_layers=10)
    assert streamed.device_bytes < more.device_bytes < plain.device_bytes
    assert more.host_bytes < streamed.host_bytes
