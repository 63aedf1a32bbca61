"""Measured steps with streamed weights over an emulated link, beside the simulator's."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from sim.schedules.streamed import Streams
from sim.simulate import Strategy, simulate
from sim.timing.phases import costs_of_phases
from zenflow import PacedLink, ZenFlowAdamW, ZenFlowConfig, stream_weights

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


def measured(seconds, rate, streamed, *, accumulation=1, steps=16):
    """Return the seconds of a step in the least disturbed window, and the last report."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(seconds) for _ in range(LAYERS)))
    stream = stream_weights(model, "cpu", layers=list(model), **streamed)
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-4, config=ZenFlowConfig(topk_ratio=0, update_interval=WINDOW),
        offload_gradients="release", host_threads=1, link=PacedLink(rate, rate),
        accumulation_steps=accumulation,
    )  # fmt: skip
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        for _ in range(accumulation):
            model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - started)
    report = optimizer.report
    optimizer.close()
    stream.close()
    windows = [taken[first : first + WINDOW] for first in range(WINDOW, steps, WINDOW)]
    return min(map(sum, windows)) / WINDOW, report


def predicted(seconds, alone, rate, streamed, *, accumulation=1):
    """Return the prediction where a step takes so long alone, with the engine's own work."""
    num_params = LAYERS * WIDTH * WIDTH
    forward = LAYERS * seconds
    costs = costs_of_phases(
        forward=forward, backward=alone - forward, d2h=2 * num_params / rate,
        update=1e-3, h2d=2 * num_params / rate, num_params=num_params, num_layers=LAYERS,
    )  # fmt: skip
    costs = replace(costs, accumulation=accumulation)
    return simulate(costs, Strategy.of("zenflow", topk_ratio=0, streams=Streams(**streamed)))


CASES = {
    "hidden": (0.012, 2.4e7, {"slots": 3}, 1),
    "bound by the link": (0.004, 1.0e7, {"slots": 3}, 1),
    "two slots": (0.008, 1.6e7, {"slots": 2}, 1),
    "some stay": (0.004, 1.0e7, {"slots": 3, "resident_layers": 3}, 1),
    "two micro-batches": (0.004, 1.6e7, {"slots": 3}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_predicted(name):
    _, _, streamed, accumulation = CASES[name]
    prediction = predicted(1e-3, 1e-1, 1e9, streamed, accumulation=accumulation)
    _, report = measured(0.0, 1e12, streamed, accumulation=accumulation, steps=8)
    assert report.d2h_bytes == pytest.approx(prediction.d2h_bytes, rel=1e-9)
    assert report.h2d_bytes == pytest.approx(prediction.h2d_bytes, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_as_long_as_predicted(name):
    seconds, rate, streamed, accumulation = CASES[name]
    alone, _ = measured(seconds, 1e12, {"resident_layers": LAYERS - 1})
    prediction = predicted(seconds, alone, rate, streamed, accumulation=accumulation)
    step, _ = measured(seconds, rate, streamed, accumulation=accumulation)
    assert step == pytest.approx(prediction.step_seconds, rel=0.08)
