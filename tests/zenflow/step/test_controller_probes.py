"""What is measured for a controller: norms of the gradients that wait, and energy curves."""

import copy
import itertools
import subprocess
import sys

import pytest
import torch

from tests.models import TINY, GivenGradients, TinyStack, closing, weights_of
from tests.starts import environment
from tests.zenflow.decisions import decisions
from tests.zenflow.test_reference import feed
from zenflow import AbstractController, LoggedDecisions, ZenFlowAdamW, ZenFlowConfig
from zenflow.rule.blocks import important_count
from zenflow.rule.importance import CURVE_RATIOS
from zenflow.step import controller_probes

SHAPES = [(48, 64), (7,), (32, 100), (96, 30)]


class Watching(AbstractController):
    """Looks on; or replays a log while it does."""

    def __init__(self, log=(), *, windows=True, curve_interval=0):
        self.replay = LoggedDecisions(log)
        self.measures_windows, self.curve_interval = windows, curve_interval
        self.least_topk_ratio = self.replay.least_topk_ratio

    def next_knobs(self, step, report, knobs):
        return self.replay.next_knobs(step, report, knobs)


def config_of(**changes):
    common = {"topk_ratio": 0.3, "select_interval": 3, "block_elements": 700}
    return ZenFlowConfig(**{**TINY, **common, **changes})


class Exact:
    """The norms that reports estimate, from gradients kept whole."""

    def __init__(self, optimizer):
        self.engine = optimizer._engine
        self.sums = {b: 0.0 for b in self.engine.layout.blocks}
        self.counts = dict.fromkeys(self.engine.layout.blocks, 0)

    def expect(self, grads_by_param, max_norm=None):
        """Return the windows of the step that is about to be taken with these gradients."""
        step, norms = self.engine.step + 1, {}
        norm = sum(float(g.float().square().sum()) for g in grads_by_param.values()) ** 0.5
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for block, shape in ((b, b.shape) for b in self.engine.layout.blocks):
            ends = self.engine.calendar.next_due[block.index] == step
            grad = grads_by_param.get(block.split.param)
            if grad is not None:
                matrix = clip * grad.float().reshape(shape.num_rows, -1)
                self.sums[block] = self.sums[block] + matrix
                self.counts[block] += 1
                pair = norms.setdefault(self.counts[block], [0.0, 0.0])
                pair[0] += float(self.sums[block][:, block.deferred_columns].square().sum())
                pair[1] += float(matrix[:, block.important_columns].square().sum())
            if ends:
                self.sums[block], self.counts[block] = 0.0, 0
        return {age: tuple(pair) for age, pair in norms.items()}


def compare(config, *, num_steps=10, seed=0, mode="keep", max_norm=None, absent=0.0, log=()):
    """Yield (estimated, exact) by age after every step."""
    model = GivenGradients(SHAPES, seed=seed)
    settings = {"max_grad_norm": max_norm, "offload_gradients": mode} if mode == "release" else {}
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, controller=Watching(log), **settings
    )
    with closing(optimizer):
        exact = Exact(optimizer)
        for step in range(1, num_steps + 1):
            grads = model.draw_gradients(step, seed, absent)
            present = zip(model.parameters(), grads, strict=True)
            expected = exact.expect({p: g for p, g in present if g is not None}, max_norm)
            feed(model, optimizer, grads, mode, max_norm)
            found = {w.age: (w.accumulated, w.important) for w in optimizer.report.windows}
            assert found.keys() == expected.keys()
            assert list(found) == sorted(found)
            yield [(found[age], expected[age]) for age in found]


@pytest.mark.parametrize(
    ("ratio", "rule"),
    [
        *((ratio, "exact") for ratio in (0.01, 0.05, 0.3, 0.9)),
        (0.05, "published"),
        *(pytest.param(k, "published", marks=pytest.mark.slow) for k in (0.01, 0.3, 0.9)),
    ],
)
def test_norms_are_estimated_without_bias(ratio, rule):
    config = config_of(topk_ratio=ratio, update_rule=rule)
    estimated = total = 0.0
    for seed in range(6):
        for step in compare(config, seed=seed, num_steps=9, max_norm=0.7):
            for (ours, ours_important), (true, true_important) in step:
                assert ours_important == pytest.approx(true_important, rel=1e-4)
                estimated, total = estimated + ours, total + true
    assert estimated == pytest.approx(total, rel=0.05)


@pytest.mark.parametrize(
    "case",
    [
        {"config": config_of(update_rule="published")},
        {"config": config_of(full_warm_up_rounds=3)},
        {"config": config_of(), "mode": "release", "max_norm": 0.5},
        {"config": config_of(), "absent": 0.4},
        {"config": config_of(), "log": [(3, {"update_interval": 2}), (6, {"topk_ratio": 0.6})]},
    ],
    ids=["aligned", "warm-up", "release", "absent gradients", "changed knobs"],
)
def test_norms_follow_the_windows(case):
    case["log"] = decisions(case["config"], case.get("log", ()))
    for step in compare(**case):
        for (ours, ours_important), (true, true_important) in step:
            assert ours_important == pytest.approx(true_important, rel=1e-4)
            assert 0.5 * true < ours < 2 * true


@pytest.mark.parametrize("rule", ["exact", "published"])
def test_rolling_windows_show_all_ages_and_aligned_ones_one(rule):
    config = config_of(update_rule=rule, update_interval=3, block_elements=200)
    model = GivenGradients(SHAPES)
    ages = []
    with closing(
        ZenFlowAdamW(model.parameters(), config=config, controller=Watching())
    ) as optimizer:
        for step in range(1, 10):
            feed(model, optimizer, model.draw_gradients(step), "keep")
            ages.append([norms.age for norms in optimizer.report.windows])
    assert ages[3:] == ([[1, 2, 3]] * 6 if config.rolling else [[1], [2], [3]] * 2)


def test_opposite_gradients_cancel_and_equal_ones_add_up():
    config = config_of(update_rule="published", update_interval=2, select_interval=0)
    for sign, growth in ((-1.0, 0.0), (1.0, 4.0)):
        model = GivenGradients(SHAPES, torch.bfloat16)
        grads = model.draw_gradients(1)
        optimizer = ZenFlowAdamW(model.parameters(), config=config, controller=Watching())
        with closing(optimizer):
            feed(model, optimizer, grads, "keep")
            feed(model, optimizer, grads, "keep")  # selects
            feed(model, optimizer, grads, "keep")
            (first,) = optimizer.report.windows
            feed(model, optimizer, [sign * g for g in grads], "keep")
            (second,) = optimizer.report.windows
        assert (first.age, second.age) == (1, 2)
        assert second.accumulated == pytest.approx(growth * first.accumulated)
        assert second.important == first.important > 0


class NowAndThen(Watching):
    """Looks at windows in given steps alone."""

    def __init__(self, looks):
        super().__init__()
        self.looks, self.step = looks, 0

    @property
    def looks_at_windows(self):
        return self.step + 1 in self.looks

    def next_knobs(self, step, report, knobs):
        self.step = step
        return knobs

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


LOOKS = {1, 2, *range(6, 13), *range(16, 22)}


@pytest.mark.parametrize("mode", ["keep", "release"])
@pytest.mark.parametrize("rule", ["exact", "published"])
def test_windows_that_began_while_they_were_looked_at_have_the_norms_that_they_always_have(
    rule, mode
):
    changes = {"num_steps": 24, "update_rule": rule, "update_interval": 4, "block_elements": 150}
    always, weights = run(Watching(), mode, **changes)
    at_times, same = run(NowAndThen(LOOKS), mode, **changes)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    begun = 0
    for step, (whole, seen) in enumerate(zip(always, at_times, strict=True), start=1):
        begun = begun + 1 if step in LOOKS else 0
        whole_windows = {norms.age: norms for norms in whole.windows}
        ages = {norms.age for norms in seen.windows}
        if step > 2:  # from the first steps on, all windows have been looked at
            assert all(age <= begun for age in ages)
        assert ages == {age for age in whole_windows if age <= begun}
        for norms in seen.windows:
            expected = whole_windows[norms.age]
            assert norms.accumulated == pytest.approx(expected.accumulated, rel=1e-5)
            assert norms.important == pytest.approx(expected.important, rel=1e-5)
    assert any(norms.age == 4 for report in at_times for norms in report.windows)


def test_nothing_is_sketched_in_steps_that_nobody_looks_at(monkeypatch):
    taken = []
    for name in ("take", "read", "close"):
        whole = getattr(controller_probes.WindowSketch, name)

        def counted(self, *args, whole=whole):
            taken.append(self.is_watching)
            return whole(self, *args)

        monkeypatch.setattr(controller_probes.WindowSketch, name, counted)
    monkeypatch.setattr(torch, "mm", None)  # a call would fail
    run(NowAndThen(set()))
    assert not any(taken)


@pytest.mark.parametrize("cut", [4, 7, 14, 18])
def test_a_resumed_run_looks_at_the_same_windows(cut):
    config = config_of(update_interval=4, block_elements=150)
    model = GivenGradients(SHAPES)
    controller = NowAndThen(LOOKS)
    with closing(
        ZenFlowAdamW(model.parameters(), config=config, controller=controller)
    ) as optimizer:
        expected = []
        for step in range(1, 24):
            if step == cut + 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            feed(model, optimizer, model.draw_gradients(step), "keep")
            if step > cut:
                expected.append(optimizer.report.windows)
    twin = GivenGradients(SHAPES, seed=5)
    with closing(
        ZenFlowAdamW(twin.parameters(), config=config, controller=NowAndThen(LOOKS))
    ) as optimizer:
        twin.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        found = []
        for step in range(cut + 1, 24):
            feed(twin, optimizer, model.draw_gradients(step), "keep")
            found.append(optimizer.report.windows)
    assert found == expected


def run(controller, mode="keep", *, num_steps=8, accumulation_steps=1, **changes):
    """Train a tiny stack and return its reports and last weights."""
    model = TinyStack(num_layers=4, width=24)
    settings = {}
    if mode == "release":
        settings = {
            "offload_gradients": "release",
            "max_grad_norm": 0.5,
            "accumulation_steps": accumulation_steps,
        }
    config = config_of(**changes)
    optimizer = ZenFlowAdamW(model.parameters(), config=config, controller=controller, **settings)
    reports = []
    with closing(optimizer):
        for step in range(num_steps):
            for part in range(accumulation_steps):
                model.loss(10 * step + part).backward()
            if mode == "keep":
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            reports.append(optimizer.report)
    return reports, weights_of(model)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_both_modes_and_both_rules_measure_the_first_steps_alike(accumulation_steps):
    found = []
    for mode, rule in itertools.product(("keep", "release"), ("exact", "published")):
        reports, _ = run(
            Watching(curve_interval=1),
            mode,
            num_steps=1,
            accumulation_steps=accumulation_steps,
            update_rule=rule,
        )
        found.append((reports[0].windows, reports[0].energy_curve))
    assert found == [found[0]] * 4
    assert all(norms.accumulated > 0 for norms in found[0][0])


def test_measuring_changes_no_weight():
    _, measured = run(Watching(curve_interval=2))
    _, plain = run(None)
    assert all(torch.equal(a, b) for a, b in zip(measured, plain, strict=True))


def test_nothing_is_computed_that_nobody_asks_for(monkeypatch):
    for name in ("WindowSketch", "ScoreCurve"):
        monkeypatch.setattr(controller_probes, name, None)  # a call would fail
    for controller in (None, Watching(windows=False), LoggedDecisions([])):
        reports, _ = run(controller)
        assert all(report.windows == () for report in reports)
        assert all(report.energy_curve is None for report in reports)


def test_the_memory_plan_counts_the_sketch():
    plans = []
    for controller in (None, Watching()):
        model = TinyStack(num_layers=2, width=24)
        with closing(
            ZenFlowAdamW(model.parameters(), config=config_of(), controller=controller)
        ) as optimizer:
            plans.append(optimizer.memory.device_extra_bytes)
            sketch = optimizer._engine.probes.sketch
    assert plans[1] - plans[0] == sketch.num_bytes >= 2 * 4 * 8 * (2 * 24)


def test_a_resumed_run_measures_the_same():
    config = config_of()
    model = GivenGradients(SHAPES)
    with closing(
        ZenFlowAdamW(model.parameters(), config=config, controller=Watching())
    ) as optimizer:
        for step in range(1, 7):
            feed(model, optimizer, model.draw_gradients(step), "keep")
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        feed(model, optimizer, model.draw_gradients(7), "keep")
        expected = optimizer.report.windows
    twin = GivenGradients(SHAPES, seed=5)
    with closing(
        ZenFlowAdamW(twin.parameters(), config=config, controller=Watching())
    ) as optimizer:
        feed(twin, optimizer, twin.draw_gradients(99), "keep")
        twin.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        feed(twin, optimizer, model.draw_gradients(7), "keep")
        assert optimizer.report.windows == expected
    assert max(norms.age for norms in expected) > 1


def test_a_curve_is_read_at_its_steps_and_counts_each_blocks_best_columns():
    model = GivenGradients(SHAPES)
    config = config_of(importance_decay=0.5)
    controller = Watching(windows=False, curve_interval=3)
    with closing(
        ZenFlowAdamW(model.parameters(), config=config, controller=controller)
    ) as optimizer:
        for step in range(1, 8):
            feed(model, optimizer, model.draw_gradients(step), "keep")
            curve = optimizer.report.energy_curve
            if step % 3:
                assert curve is None
                continue
            blocks = [b.columns.scores for b in optimizer._engine.layout.blocks]
            total = sum(float(scores.sum()) for scores in blocks)
            assert tuple(curve) == CURVE_RATIOS
            for ratio, share in curve.items():
                best = sum(
                    float(scores.sort(descending=True).values[:count].sum())
                    for scores in blocks
                    for count in [important_count(ratio, len(scores))]
                )
                assert share == pytest.approx(best / total, rel=1e-5)


def test_no_gradient_no_curve_and_no_window():
    model = TinyStack(num_layers=2, width=24)
    controller = Watching(curve_interval=1)
    with closing(
        ZenFlowAdamW(model.parameters(), config=config_of(), controller=controller)
    ) as optimizer:
        optimizer.step()
        assert optimizer.report.windows == ()
        assert optimizer.report.energy_curve is None
    on_device = ZenFlowConfig.preset("on_device")
    with closing(
        ZenFlowAdamW(model.parameters(), config=on_device, controller=controller)
    ) as optimizer:
        model.loss(0).backward()
        optimizer.step()
        assert optimizer.report.windows == ()
        assert optimizer.report.energy_curve is None


RANK = """
import sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from tests.models import TinyStack
from tests.zenflow.step.test_controller_probes import Watching, config_of
from zenflow import ZenFlowAdamW
rank, path = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
model = TinyStack(num_layers=3, width=24)
parallel = DistributedDataParallel(model)
optimizer = ZenFlowAdamW(model.parameters(), config=config_of(), controller=Watching())
for step in range(4):
    parallel(torch.randn(4, 24, generator=torch.Generator().manual_seed(2 * step + rank))).square(
    ).mean().backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    print(optimizer.report.grad_norm, optimizer.report.windows)
optimizer.close()
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_data_parallel_ranks_measure_the_same_without_a_word(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        (first, errors), (second, _) = (rank.communicate(timeout=120) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert first.count("WindowNorms(age=") >= 4, errors
    assert first == second
