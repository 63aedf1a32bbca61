"""The CUDA path: twins of the CPU's tests, and what only a GPU can show (overlap, peak memory).

Bit-for-bit comparisons use models whose kernels are deterministic.
"""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models import (
    TINY,
    GivenGradients,
    OddShapes,
    TinyStack,
    assert_equal,
    closing,
    relative_difference,
    weights_of,
)
from tests.zenflow import test_limits as limits
from tests.zenflow import test_reference as reference
from tests.zenflow import test_resume as resume
from tests.zenflow.decisions import decisions, intervals
from tests.zenflow.host_work import host_work
from tests.zenflow.step import test_controller_probes as probes
from tests.zenflow.step import test_timing as timing
from zenflow import (
    GradientError,
    LoggedDecisions,
    PacedLink,
    ZenFlowAdamW,
    ZenFlowConfig,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODES = ["keep", "release"]


def wide_model(num_layers=8, width=2048, dtype=torch.bfloat16):
    """Return matrices large enough for copies and computing to take a while."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))).to(
        "cuda", dtype
    )


def take_step(model, optimizer, step, batch=2048):
    p = next(model.parameters())
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(batch, p.shape[1], generator=generator, device="cuda", dtype=p.dtype)
    with optimizer.span("forward"):
        loss = (model(x) - x).float().square().mean()
    with optimizer.span("backward"):
        loss.backward()
    optimizer.step()


@pytest.mark.parametrize(("name", "mode"), limits.CASES)
def test_a_limit_is_adamw(name, mode):
    """As close as torch's own implementations are to each other: each rounds in its own way."""
    model = OddShapes().to("cuda")
    one, other = (limits.train_adamw(model, fused=fused) for fused in (False, True))
    apart = relative_difference(one, other)
    limits.check_limit(name, mode, "cuda", tolerance=1e-5 + 2 * apart)


@pytest.mark.parametrize("name", limits.KEEP_EQUALS_RELEASE)
def test_keep_and_release_give_the_same_weights_bit_for_bit(name):
    model, config = TinyStack().to("cuda"), limits.KEEP_EQUALS_RELEASE[name]
    keep = limits.train_zenflow(model, config, "keep")
    assert_equal(limits.train_zenflow(model, config, "release"), keep)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(scenario=reference.scenarios())
def test_float32_weights_follow_the_reference_step_for_step(mode, scenario):
    reference.check_scenario(scenario, mode, device="cuda")


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(scenario=reference.scenarios())
def test_bfloat16_weights_are_the_references_up_to_rounding(mode, scenario):
    reference.check_scenario(scenario, mode, torch.bfloat16, "cuda")


@settings(max_examples=10, deadline=None)
@given(config=reference.configs(block_elements=None), seed=st.integers(0, 99))
def test_a_replayed_log_changes_the_interval_at_the_logged_steps(config, seed):
    log = intervals(config, [(3, 2), (6, 4), (11, 1)])
    scenario = reference.Scenario(config, [(6, 5), (3, 8)], num_steps=16, log=log, seed=seed)
    reference.check_scenario(scenario, "release", device="cuda")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slow", timing.SLOWNESS)
@pytest.mark.parametrize("rule", timing.RULES)
def test_random_delays_change_no_bit(monkeypatch, rule, slow, mode):
    timing.check_delays(monkeypatch, rule, slow, mode, num_steps=24, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", timing.RULES)
def test_a_thousand_steps_with_random_delays_change_no_bit(monkeypatch, rule, mode, pytestconfig):
    steps = pytestconfig.getoption("--race-steps")
    timing.check_delays(monkeypatch, rule, "everything", mode, num_steps=steps, device="cuda")


@pytest.mark.parametrize("rule", timing.RULES)
def test_a_long_run_of_tiny_layers_repeats_bit_for_bit(rule):
    """Nothing to compute between two copies: a missing wait on any stream shows here."""
    config = timing.config_of(rule)

    def model():
        return TinyStack(num_layers=20, width=8)

    runs = [
        timing.train(model, config, mode, 60, "cuda", host_threads=threads)[-1]
        for mode, threads in [("keep", 1), ("release", 1), ("release", 4), ("keep", 4)]
    ]
    for other in runs[1:]:
        assert_equal(other, runs[0])


def test_a_busy_device_changes_no_bit():
    """With the compute stream far behind the launching thread, and never behind it."""
    config, results = timing.config_of("S 2"), []
    for wait in ("never", "always", "device busy"):
        model = TinyStack(num_layers=20, width=8).to("cuda")
        optimizer = ZenFlowAdamW(
            model.parameters(),
            lr=1e-2,
            config=config,
            offload_gradients="release",
            max_grad_norm=0.3,
        )
        with closing(optimizer):
            for step in range(60):
                if wait == "device busy":
                    torch.cuda._sleep(2_000_000)  # about a millisecond of the compute stream
                loss = model.loss(step)
                if wait == "device busy":
                    torch.cuda._sleep(2_000_000)
                loss.backward()
                optimizer.step()
                if wait == "always":
                    torch.cuda.synchronize()
            results.append(weights_of(model))
    assert_equal(results[1], results[0], "synchronized")
    assert_equal(results[2], results[0], "device busy")


def test_training_on_a_side_stream_changes_no_bit():
    config, results = timing.config_of("S 3"), []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            results.append(timing.train(TinyStack, config, "release", 40, "cuda")[-1])
        torch.cuda.synchronize()
    assert_equal(*results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", resume.RULES)
def test_a_checkpoint_of_any_step_resumes_bit_for_bit(rule, mode):
    config = resume.config_of(rule)
    resume.check_resume({"config": config, "mode": mode, "device": "cuda", "model": TinyStack})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("log", resume.SCHEDULES.values(), ids=resume.SCHEDULES)
def test_a_run_whose_knobs_changed_resumes_bit_for_bit(log, dtype):
    config = resume.config_of("exact")
    resume.check_resume(
        {
            "config": config,
            "mode": "release",
            "device": "cuda",
            "model": TinyStack,
            "dtype": dtype,
            "log": log,
        }
    )


def test_a_checkpoint_of_a_cpu_run_loads_on_the_gpu():
    """The moments go on where they were: weights agree as closely as the devices' arithmetic."""
    config, results = resume.config_of("exact"), []
    with closing(resume.Run(config, "keep", model=TinyStack)) as run:
        for step in range(6):
            run.step(step)
        saved = run.save()
    for device in ("cpu", "cuda"):
        with closing(resume.Run(config, "keep", model=TinyStack, device=device, seed=7)) as run:
            run.load(saved)
            results.append([run.step(step) for step in range(6, 10)][-1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_eval_and_train_are_exact(mode):
    config = timing.config_of("S 5, q 2")
    settings = {"max_grad_norm": 0.3, "offload_gradients": mode} if mode == "release" else {}
    results = []
    for evaluates in (False, True):
        model = TinyStack().to("cuda")
        with closing(ZenFlowAdamW(model.parameters(), config=config, **settings)) as optimizer:
            for step in range(20):
                model.loss(step).backward()
                optimizer.step()
                if evaluates:
                    before = weights_of(model)
                    optimizer.eval()
                    with torch.no_grad():
                        model.loss(step)
                    optimizer.train()
                    assert_equal(weights_of(model), before, f"step {step}")
            results.append(weights_of(model))
    assert_equal(*results)


def test_copies_and_host_overlap_the_device():
    """Seen in CUDA events: while the device computes, both copy lanes and the host are at work."""
    model = wide_model()
    optimizer = ZenFlowAdamW(
        model.parameters(), offload_gradients="release", max_grad_norm=1.0, timeline_steps=8
    )
    with closing(optimizer):
        for step in range(16):
            take_step(model, optimizer, step, batch=8192)
        timeline = optimizer.timeline
    for lane in ("d2h", "h2d", "host"):
        busy = timeline.busy(lane)
        assert busy > 0, lane
        overlap = timeline.overlap("device", lane)
        assert overlap > 0.3 * busy, f"{lane}: {overlap:.4g} s of {busy:.4g} s"
    copies = [span for span in timeline.spans if span.lane in ("d2h", "h2d")]
    assert all(span.num_bytes > 0 and span.end > span.start for span in copies)


def test_reports_add_up():
    model = wide_model(num_layers=4)
    model_bytes = sum(p.nbytes for p in model.parameters())
    config = ZenFlowConfig(select_interval=0)
    reports = []
    with closing(
        ZenFlowAdamW(
            model.parameters(), config=config, offload_gradients="release", max_grad_norm=1.0
        )
    ) as optimizer:
        for step in range(16):
            take_step(model, optimizer, step)
            optimizer.synchronize()
            reports.append(optimizer.report)
    assert [report.step for report in reports] == list(range(1, 17))
    down = sum(report.d2h_bytes for report in reports[8:]) / 8
    up = sum(report.h2d_bytes for report in reports[8:]) / 8
    assert down == pytest.approx(0.9 * model_bytes, rel=0.02)
    assert up == pytest.approx(0.9 * model_bytes / 4, rel=0.02)
    for report in reports:
        assert 0 <= report.stall_seconds <= 1.01 * report.seconds
        assert math.isfinite(report.grad_norm)


def peak_bytes(mode):
    """Return the most device memory that steps take beyond what lies there between them."""
    model = wide_model(num_layers=16)
    settings = {"max_grad_norm": 1.0, "offload_gradients": mode} if mode == "release" else {}
    with closing(ZenFlowAdamW(model.parameters(), **settings)) as optimizer:
        for step in range(4):
            take_step(model, optimizer, step, batch=64)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for step in range(4, 12):
            take_step(model, optimizer, step, batch=64)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def test_release_mode_needs_less_memory_at_its_peak_than_keep_mode():
    grad_bytes = 16 * 2048 * 2048 * 2
    keep, release = peak_bytes("keep"), peak_bytes("release")
    assert keep >= 0.9 * grad_bytes
    assert release < keep - 0.4 * grad_bytes, f"release {release:,} B, keep {keep:,} B"


def test_device_memory_is_as_planned():
    model = wide_model()
    gc.collect()
    before = torch.cuda.memory_allocated()
    with closing(
        ZenFlowAdamW(model.parameters(), offload_gradients="release", max_grad_norm=1.0)
    ) as optimizer:
        plan = optimizer.memory
        taken = torch.cuda.memory_allocated() - before
        assert taken <= 1.02 * (plan.device_extra_bytes + plan.device_ring_bytes) + 2**20
        for step in range(8):
            take_step(model, optimizer, step, batch=16)
        optimizer.synchronize()
    assert plan.device_extra_bytes <= 12 * 0.1 * plan.num_params * 1.1
    assert 0 < plan.host_bytes_per_param <= 20
    assert 0 < plan.pinned_bytes < plan.host_bytes


@pytest.mark.parametrize("mode", MODES)
def test_device_memory_does_not_grow(mode):
    model = TinyStack(num_layers=6, width=32).to("cuda")
    settings = {"max_grad_norm": 1.0, "offload_gradients": mode} if mode == "release" else {}
    config = ZenFlowConfig(select_interval=5, **TINY)
    with closing(ZenFlowAdamW(model.parameters(), config=config, **settings)) as optimizer:
        measured = []
        for _ in range(3):
            for step in range(200):
                model.loss(step).backward()
                optimizer.step()
            optimizer.synchronize()
            gc.collect()
            measured.append(torch.cuda.memory_allocated())
    assert measured[2] <= measured[1] + 4096


def test_closing_gives_device_memory_back():
    model = wide_model(num_layers=4)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        optimizer = ZenFlowAdamW(
            model.parameters(), offload_gradients="release", max_grad_norm=1.0
        )
        for step in range(3):
            take_step(model, optimizer, step, batch=16)
        optimizer.close()
        del optimizer
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite_is_reported_a_step_late_at_most(mode):
    model = TinyStack(num_layers=3).to("cuda")
    settings = {"max_grad_norm": 1.0, "offload_gradients": mode} if mode == "release" else {}
    config = ZenFlowConfig(**TINY)

    def train_into_it():
        for step in range(6):
            (model.loss(step) * (math.nan if step == 3 else 1.0)).backward()
            optimizer.step()

    optimizer = ZenFlowAdamW(model.parameters(), config=config, **settings)
    with closing(optimizer), pytest.raises(GradientError, match="step 4"):
        train_into_it()


def test_a_failing_worker_reaches_a_step(monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("a broken part")

    model = TinyStack(num_layers=3).to("cuda")
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**TINY), wait_timeout=20)
    for owner, name in host_work("sum", "catch_up"):
        monkeypatch.setattr(owner, name, fail)

    def train():
        for step in range(8):
            model.loss(step).backward()
            optimizer.step()

    with closing(optimizer), pytest.raises(Exception, match="a broken part"):
        train()


def test_float16_with_a_grad_scaler_skips_overflows():
    model = TinyStack(num_layers=4, dtype=torch.float16).to("cuda")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1000)
    with closing(ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**TINY))) as optimizer:
        for step in range(12):
            before = weights_of(model)
            scaler.scale(model.loss(step) * (1e30 if step == 5 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 5:
                assert_equal(weights_of(model), before)
        optimizer.synchronize()
        assert optimizer.report.step == 11
        assert scaler.get_scale() == 2.0**7


def test_a_paced_link_is_for_cpus():
    with pytest.raises(ValueError, match="CPU"):
        ZenFlowAdamW(TinyStack().to("cuda").parameters(), link=PacedLink(1e9, 1e9))


def test_norms_and_curves_are_the_cpus_one_step_later():
    config = probes.config_of()
    found = {}
    for device in ("cpu", "cuda"):
        model = GivenGradients(probes.SHAPES).to(device)
        controller = probes.Watching(curve_interval=2)
        with closing(
            ZenFlowAdamW(model.parameters(), config=config, controller=controller)
        ) as optimizer:
            reports = []
            for step in range(1, 10):
                reference.feed(model, optimizer, model.draw_gradients(step), "keep")
                reports.append(optimizer.report)
            found[device] = reports
    assert found["cuda"][0] is None
    for ours, theirs in zip(found["cuda"][1:], found["cpu"], strict=False):
        assert (ours.step, len(ours.windows)) == (theirs.step, len(theirs.windows))
        for a, b in zip(ours.windows, theirs.windows, strict=True):
            assert a.age == b.age
            assert a.accumulated == pytest.approx(b.accumulated, rel=1e-3)
            assert a.important == pytest.approx(b.important, rel=1e-3)
        if theirs.energy_curve is None:
            assert ours.energy_curve is None
        else:
            assert ours.energy_curve == pytest.approx(theirs.energy_curve, rel=1e-3)


KNOB_CHANGES = [
    (5, {"update_interval": 2}),
    (9, {"update_interval": 3, "topk_ratio": 0.4}),
    (14, {"topk_ratio": 0.05}),
]


def test_every_kind_of_parameter_trains():
    model = OddShapes(dtype=torch.bfloat16).to("cuda")
    config = ZenFlowConfig(block_elements=30, select_interval=3, **TINY)
    controller = LoggedDecisions(decisions(config, KNOB_CHANGES))
    optimizer = ZenFlowAdamW(
        model.parameters(),
        config=config,
        offload_gradients="release",
        max_grad_norm=1.0,
        controller=controller,
    )
    with closing(optimizer):
        for step in range(20):
            loss = model.loss(step, idle=True)
            loss.backward()
            optimizer.step()
        assert math.isfinite(float(loss.detach()))
