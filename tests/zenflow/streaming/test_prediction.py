"""Measured steps with streamed weights over an emulated link, beside the simulator's."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from sim.machine import Machine
from sim.schedules.streams import Streams
from sim.simulate import Strategy, simulate
from sim.timing.phases import costs_of_phases
from zenflow import PacedLink, ZenFlowAdamW, ZenFlowConfig, stream_weights
from zenflow.streaming.transfers import DOWN, UP

LAYERS, WIDTH, WINDOW = 8, 256, 4


class Timed(torch.autograd.Function):
    """A product of matrices that takes so many seconds each way, and next to no processor."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        ctx.save_for_backward(x, weight)
        time.sleep(seconds)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grad @ weight, grad.t() @ x, None


class Layer(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH)
        self.seconds = seconds

    def forward(self, x):
        return x + Timed.apply(x, self.weight, self.seconds)


def config_of(changes):
    return ZenFlowConfig(
        **{"topk_ratio": 0, "update_interval": WINDOW, "select_interval": 1000, **changes}
    )


def measured(seconds, rate, streamed, *, accumulation=1, changes=None, steps=20):
    """Return the seconds and the bytes of a step in the least disturbed of the later windows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(seconds) for _ in range(LAYERS)))
    stream = stream_weights(model, "cpu", layers=list(model), **streamed)
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-4, config=config_of(changes or {}),
        offload_gradients="release", host_threads=1, link=PacedLink(rate, rate),
        accumulation_steps=accumulation,
    )  # fmt: skip
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        for _ in range(accumulation):
            model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        passed = time.perf_counter() - started
        report = optimizer.report
        taken.append((passed, report.d2h_bytes, report.h2d_bytes))
    optimizer.close()
    stream.close()
    windows = [taken[first : first + WINDOW] for first in range(2 * WINDOW, steps, WINDOW)]
    return min(tuple(sum(each) / WINDOW for each in zip(*own, strict=True)) for own in windows)


def predicted(seconds, alone, rate, streamed, *, accumulation=1, changes=None):
    """Return the prediction where a step takes so long alone, with the engine's own work."""
    num_params = LAYERS * WIDTH * WIDTH
    forward = LAYERS * seconds
    costs = costs_of_phases(
        forward=forward, backward=alone - forward, d2h=2 * num_params / rate,
        update=1e-3, h2d=2 * num_params / rate, num_params=num_params, num_layers=LAYERS,
    )  # fmt: skip
    # A CPU plays the device: no work is launched ahead, and so no copy is asked for ahead.
    machine = costs.hardware
    machine = replace(
        machine,
        device=replace(machine.device, is_cpu=True),
        host=replace(machine.host, cores=64),  # sleepers need none
    )
    costs = replace(costs, hardware=machine, accumulation=accumulation)
    strategy = Strategy(
        name="zenflow", config=config_of(changes or {}), streams=Streams(**streamed)
    )
    return simulate(costs, strategy)


CASES = {
    "hidden": (0.016, 1.8e7, {"slots": 3}, 1),
    "bound by the link": (0.008, 0.5e7, {"slots": 3}, 1),
    "two slots": (0.016, 0.8e7, {"slots": 2}, 1),
    "some stay": (0.008, 0.5e7, {"slots": 3, "resident_layers": 3}, 1),
    "two slots, and some stay": (0.008, 0.5e7, {"slots": 2, "resident_layers": 3}, 1),
    "two micro-batches": (0.008, 0.8e7, {"slots": 3}, 2),
    "important columns": (0.008, 0.6e7, {"slots": 3}, 1, {"topk_ratio": 0.25}),
    "the published rule": (
        *(0.016, 0.3e7, {"slots": 3}, 1),
        {"topk_ratio": 0.25, "update_rule": "published"},
    ),
    "updates land in their step": (
        *(0.008, 0.8e7, {"slots": 3}, 1),
        {"overlap_step": False, "update_interval": 1},
    ),
    "and in their window": (
        *(0.008, 0.8e7, {"slots": 2, "resident_layers": 2}, 1),
        {"topk_ratio": 0.25, "overlap_step": False},
    ),
}


def case(name):
    """Return seconds, rate, streams, and further arguments of `measured` and `predicted`."""
    seconds, rate, streamed, accumulation, *changes = CASES[name]
    return (seconds, rate, streamed), {
        "accumulation": accumulation,
        "changes": changes[0] if changes else None,
    }


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_predicted(name):
    (_, _, streamed), more = case(name)
    prediction = predicted(1e-3, 1e-1, 1e9, streamed, **more)
    _, down, up = measured(0.0, 1e12, streamed, **more, steps=12)
    assert down == pytest.approx(prediction.d2h_bytes, rel=1e-9)
    assert up == pytest.approx(prediction.h2d_bytes, rel=1e-9)


def selecting(costs, strategy, steps):
    """Return the simulated bytes of visiting weights by step, up and down."""
    machine = Machine(costs.hardware)
    machine.run(strategy.schedule(machine, costs).run(steps))
    totals = machine.recording.totals
    return [
        tuple(totals.get((lane, "weights", step), (0.0, 0.0))[1] for lane in (UP, DOWN))
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize("slots", [2, 3])
def test_bytes_of_selections_are_those_predicted(slots):
    """In each step of a window the columns of two layers change owner, in one block each."""
    changes, steps = {"topk_ratio": 0.1, "select_interval": 6, "block_elements": WIDTH**2}, 16
    strategy = Strategy(name="zenflow", config=config_of(changes), streams=Streams(slots=slots))
    costs = costs_of_phases(
        forward=1.0, backward=2.0, d2h=1e-3, update=1e-3, h2d=1e-3,
        num_params=LAYERS * WIDTH**2, num_layers=LAYERS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(0.0) for _ in range(LAYERS)))
    stream = stream_weights(model, "cpu", layers=list(model), slots=slots)
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-4, config=config_of(changes), offload_gradients="release"
    )
    found = []
    for _ in range(steps):
        model(torch.randn(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        found.append((optimizer.report.weights_h2d_bytes, optimizer.report.weights_d2h_bytes))
    optimizer.close()
    stream.close()
    # The optimizer has let weights come before the first step.
    assert found[1:] == selecting(costs, strategy, steps)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_as_long_as_predicted(name):
    (seconds, rate, streamed), more = case(name)
    for _ in range(4):  # a busy machine makes steps longer, and none shorter
        alone, *_ = measured(seconds, 1e12, {"resident_layers": LAYERS - 1})
        prediction = predicted(seconds, alone, rate, streamed, **more)
        step, *_ = measured(seconds, rate, streamed, **more)
        if step == pytest.approx(prediction.step_seconds, rel=0.02):
            return
    pytest.fail(f"a step takes {step} s, and is predicted at {prediction.step_seconds} s")
