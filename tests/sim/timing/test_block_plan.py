"""The simulator's blocks and bytes are the engine's own."""

import pytest

pytest.importorskip("torch")

import torch

from sim.simulate import Strategy, simulate
from sim.timing.block_plan import BlockPlan
from sim.timing.costs import StepCosts
from sim.timing.phases import costs_of_phases
from sim.timing.segments import Segment
from zenflow import ZenFlowAdamW, ZenFlowConfig

SHAPES = [(300, 128), (128, 128), (512, 128), (128, 512), (64, 128), (258, 128)]
CONFIGS = {
    "zenflow": {"min_split_elements": 10_000},
    "S=3": {"min_split_elements": 10_000, "update_interval": 3},
    "k=0.3": {"min_split_elements": 0, "topk_ratio": 0.3},
    "small blocks": {"min_split_elements": 0, "block_elements": 5_000},
    "k=0": {"min_split_elements": 0, "topk_ratio": 0.0},
}


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(i, o) for o, i in SHAPES)


def costs():
    """One segment for each layer, on a machine on which everything takes time."""
    base = costs_of_phases(
        forward=1e-3, backward=2e-3, d2h=1e-3, update=1e-3, h2d=1e-3, num_params=400_000
    )
    segments = tuple(
        Segment(name=f"{i}", forward=1e-3, backward=2e-3, matrices=(shape,), vectors=shape[0])
        for i, shape in enumerate(SHAPES)
    )
    return StepCosts(segments=segments, hardware=base.hardware, dtype_bytes=4)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_cut_as_the_engine_cuts_them(name):
    config = ZenFlowConfig(**CONFIGS[name])
    plan = BlockPlan(costs(), config)
    layers = model()
    optimizer = ZenFlowAdamW(layers.parameters(), config=config)
    try:
        blocks = optimizer._engine.layout.blocks
        assert [block.shape for block in plan.blocks] == [block.shape for block in blocks]
        assert plan.calendar().next_due == optimizer._engine.calendar.next_due
        deferred = sum(share.deferred for share in plan.shares)
        assert plan.important + plan.resident + deferred == sum(
            p.numel() for p in layers.parameters()
        )
        # A block's segment is the layer that its parameter belongs to.
        owners = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters()}
        homes = [owners[id(block.split.param)] for block in blocks]
        assert [block.segment for block in plan.blocks] == homes
    finally:
        optimizer.close()


@pytest.mark.parametrize("preset", ["zero_offload", "delayed", "zenflow_paper", "zenflow"])
def test_bytes_a_step_are_what_the_engine_counts(preset):
    config = ZenFlowConfig.preset(preset, min_split_elements=0)
    layers = model()
    optimizer = ZenFlowAdamW(
        layers.parameters(), config=config, offload_gradients="release", max_grad_norm=1.0
    )
    window = config.update_interval
    down, up = [], []
    try:
        for step in range(1, 6 * window + 1):
            loss = sum(
                layer(torch.randn(2, layer.in_features)).square().mean() for layer in layers
            )
            loss.backward()
            optimizer.step()
            if step > 4 * window:
                down.append(optimizer.report.d2h_bytes)
                up.append(optimizer.report.h2d_bytes)
    finally:
        optimizer.close()
    once = {"select_interval": 0} if preset.startswith("zenflow") else {}
    predicted = simulate(costs(), Strategy.of(preset, min_split_elements=0, **once))
    assert predicted.d2h_bytes == pytest.approx(sum(down) / len(down))
    assert predicted.h2d_bytes == pytest.approx(sum(up) / len(up))
