"""Bytes over the link, as the reports count them, are those of the cost model."""

import itertools
import math

import pytest
import torch
from torch import nn

from tests.models import closing
from zenflow import ZenFlowAdamW, ZenFlowConfig

WIDTH = 256


def make_model(dtype):
    """Return a stack of square matrices: next to nothing of it is resident."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH)).to(dtype)


def reports_of(model, config, num_steps, **settings):
    """Train on noise and return every step's report."""
    reports = []
    optimizer = ZenFlowAdamW(
        model.parameters(),
        config=config,
        offload_gradients="release",
        max_grad_norm=1.0,
        **settings,
    )
    with closing(optimizer):
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, WIDTH, generator=generator).to(next(model.parameters()))
            (model(x) - x.roll(1)).float().square().mean().backward()
            optimizer.step()
            optimizer.synchronize()
            reports.append(optimizer.report)
    return reports


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["exact", "published"])
@pytest.mark.parametrize(("ratio", "window"), [(0.1, 4), (0.1, 2), (0.3, 3), (0.0, 4)])
def test_traffic_per_step_is_the_cost_models_within_two_percent(ratio, window, rule, dtype):
    model = make_model(dtype)
    config = ZenFlowConfig(
        topk_ratio=ratio, update_interval=window, update_rule=rule, select_interval=0
    )
    num_windows = 3
    reports = reports_of(model, config, (num_windows + 2) * window)[2 * window :]
    model_bytes = sum(p.nbytes for p in model.parameters())
    down, up = mean(r.d2h_bytes for r in reports), mean(r.h2d_bytes for r in reports)
    assert down == pytest.approx((1 - ratio) * model_bytes, rel=0.02)
    assert up == pytest.approx((1 - ratio) * model_bytes / window, rel=0.02)
    expected = (window + 1) * (1 - ratio) * model_bytes / window
    assert down + up == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("preset", ["zero_offload", "delayed"])
def test_zero_offload_moves_the_model_both_ways_in_every_step(preset):
    model = make_model(torch.bfloat16)
    model_bytes = sum(p.nbytes for p in model.parameters())
    for report in reports_of(model, ZenFlowConfig.preset(preset), 6)[2:]:
        assert report.d2h_bytes + report.h2d_bytes == pytest.approx(2 * model_bytes, rel=0.02)


def test_on_device_moves_nothing():
    for report in reports_of(make_model(torch.float32), ZenFlowConfig.preset("on_device"), 3):
        assert (report.d2h_bytes, report.h2d_bytes, report.stall_seconds) == (0, 0, 0.0)


def test_rolling_windows_upload_the_same_in_every_step_and_aligned_ones_in_bursts():
    uploads = {}
    for rule in ("exact", "published"):
        config = ZenFlowConfig(update_rule=rule, select_interval=0)
        reports = reports_of(make_model(torch.bfloat16), config, 16)[8:]
        uploads[rule] = [report.h2d_bytes for report in reports]
    assert max(uploads["exact"]) <= 1.05 * min(uploads["exact"])
    assert sum(size > 0 for size in uploads["published"]) == 2
    assert sum(uploads["exact"]) == sum(uploads["published"])


@pytest.mark.parametrize(
    ("changes", "lag"),
    [
        ({}, 1),
        ({"update_rule": "published"}, 4),
        ({"overlap_step": False}, 0),
    ],
)
def test_reports_say_what_was_in_force_and_how_stale_gradients_were(changes, lag):
    config = ZenFlowConfig(update_interval=4, **changes)
    reports = reports_of(make_model(torch.float32), config, 14, lr=1e-3)
    assert [report.step for report in reports] == list(range(1, 15))
    for report in reports:
        assert (report.update_interval, report.lag, report.topk_ratio) == (4, lag, 0.1)
        assert report.learning_rates == (1e-3,)
        assert 0 < report.clip_factor <= 1
        assert report.clip_factor == pytest.approx(min(1, 1 / report.grad_norm), rel=1e-4)
        assert 0 < report.captured_energy < 1
        assert sum(report.stalls.values()) == pytest.approx(report.stall_seconds)
        assert 0 <= report.stall_seconds <= report.seconds
        assert (report.staleness > 0) == (report.h2d_bytes > 0)
    # A window's oldest gradient is used S - 1 steps before the boundary, lands lag steps after it,
    # and is in the weights of the forward that follows.
    assert max(report.staleness for report in reports) == lag + 4


def test_the_captured_energy_and_the_norm_are_the_gradients():
    model = make_model(torch.float32)
    config = ZenFlowConfig(topk_ratio=0.25, select_interval=0)
    params = list(model.parameters())
    torch.manual_seed(0)
    with closing(ZenFlowAdamW(params, config=config)) as optimizer:
        for p in params:
            p.grad = torch.randn_like(p)
        grads = [p.grad.clone() for p in params]
        optimizer.step()
        optimizer.synchronize()
        report = optimizer.report
    assert report.grad_norm == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in grads))
    )
    # The important columns are still the evenly spaced ones that every block starts with.
    assert report.captured_energy == pytest.approx(0.25, rel=0.05)
    assert report.clip_factor == 1.0


@pytest.mark.parametrize("mode", ["keep", "release"])
def test_a_loss_scale_is_in_no_reported_number(mode):
    reports = []
    for scale in (1.0, 16.0):
        model = make_model(torch.float32)
        with closing(
            ZenFlowAdamW(model.parameters(), offload_gradients=mode, max_grad_norm=0.5)
        ) as optimizer:
            optimizer.grad_scale = torch.tensor(scale)  # as a GradScaler leaves it
            generator = torch.Generator().manual_seed(0)
            grads = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            pairs = zip(model.parameters(), grads, strict=True)
            (scale * sum((p * g).sum() for p, g in pairs)).backward()
            optimizer.step()
            optimizer.synchronize()
            reports.append(optimizer.report)
    plain, scaled = reports
    assert plain.clip_factor == pytest.approx(0.5 / plain.grad_norm, rel=1e-5)
    assert scaled.clip_factor == pytest.approx(plain.clip_factor, rel=1e-6)
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)


def test_all_energy_is_captured_where_nothing_is_deferred():
    model = make_model(torch.float32)
    reports = reports_of(model, ZenFlowConfig.preset("on_device"), 2, lr=1e-3)
    assert [report.captured_energy for report in reports] == [1.0, 1.0]
    reports = reports_of(
        make_model(torch.float32), ZenFlowConfig.preset("zero_offload"), 2, lr=1e-3
    )
    assert [report.captured_energy for report in reports] == [0.0, 0.0]
    params = list(make_model(torch.float32).parameters())
    with closing(ZenFlowAdamW(params, config=ZenFlowConfig(topk_ratio=0.25))) as optimizer:
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.report.captured_energy == 1.0


def test_a_selection_is_counted_as_traffic_of_columns_not_of_the_model():
    config = ZenFlowConfig(select_interval=4, importance_decay=0.0, hysteresis=0.0)
    model = make_model(torch.bfloat16)
    model_bytes = sum(p.nbytes for p in model.parameters())
    for first, second in itertools.pairwise(reports_of(model, config, 16)):
        assert first.d2h_bytes + second.d2h_bytes < 4 * model_bytes
