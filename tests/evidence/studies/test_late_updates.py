"""Rules for late updates: their limits, and the rules that they are compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from evidence.studies.late_updates.design import ADAMW, FRESH, NO_FRESH, rule_of
from evidence.studies.late_updates.optimizer import Group, Hypers, LateOptimizer
from evidence.studies.late_updates.rules import FormerBlock, Rule
from evidence.studies.late_updates.study import STUDY
from experiments.lab.finding import Verdict
from experiments.lab.study import Scope
from tests.published_reference import PublishedReference
from tests.reference import Reference
from zenflow.config import ZenFlowConfig
from zenflow.rule.adamw import Hyper
from zenflow.rule.momentum import delay

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-2
MOST_NORM = 2.0
"""About every second step's gradients are longer and are clipped."""
STEPS = 14
HYPER = Hyper(LR, *BETAS, EPS, DECAY)
FORMER = Rule(name="former", kind="former")
PUBLISHED = Rule(name="published", kind="published", lag=4, rolling=False)
LATE = Rule(name="late")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 6))


def make_grads(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(p.shape, generator=generator) * 0.1 for p in model.parameters()]
        for _ in range(STEPS)
    ]


def config_of(**changes):
    known = {"min_split_elements": 64, "topk_ratio": 0.25, "select_interval": 6}
    return ZenFlowConfig(**{**known, "block_elements": 80, **changes})


def groups_of(model, decay=DECAY):
    params = list(model.parameters())
    return [([p for p in params if p.ndim > 1], decay), ([p for p in params if p.ndim < 2], 0.0)]


def rate(step):
    return LR * (1 + step % 3)


def trained(rule, config, grads=None, *, true=False, rate=rate, decay=DECAY):
    """Return the weights after each step."""
    model = make_model()
    groups = [Group(params=params, weight_decay=own) for params, own in groups_of(model, decay)]
    optimizer = LateOptimizer(groups, rule, config, Hypers(betas=BETAS, eps=EPS))
    found = []
    for step, own in enumerate(grads or make_grads(model)):
        for param, grad in zip(model.parameters(), own, strict=True):
            param.grad = grad.clone()
        optimizer.step(rate(step), MOST_NORM)
        if true:
            with optimizer.true_weights():
                found.append([p.detach().clone() for p in model.parameters()])
        else:
            found.append([p.detach().clone() for p in model.parameters()])
    return found


def torch_trained():
    """Return the weights after each step of torch.optim.AdamW."""
    model = make_model()
    groups = [{"params": ps, "weight_decay": decay} for ps, decay in groups_of(model)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    found = []
    for step, own in enumerate(make_grads(model)):
        for param, grad in zip(model.parameters(), own, strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    return found


def assert_same(found, expected, tolerance=2e-6):
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=tolerance, msg=f"step {step}"
            )


def test_without_deferred_columns_it_is_adamw_of_torch():
    assert_same(trained(None, config_of()), torch_trained())


@pytest.mark.parametrize("interval", [1, 3, 4])
@pytest.mark.parametrize("fresh", ["none", "column", "factored"])
def test_the_masters_of_a_late_rule_are_adamw_s_in_every_step(interval, fresh):
    rule = Rule(name="late", interval=interval, fresh=fresh)
    found = trained(rule, config_of(update_interval=interval), true=True)
    assert_same(found, torch_trained())


def test_without_delay_and_with_windows_of_one_step_forward_sees_adamw_s_weights():
    rule = Rule(name="no overlap", interval=1, lag=0)
    assert_same(trained(rule, config_of(update_interval=1)), torch_trained())


def referred(config, grads):
    model = make_model()
    groups = [
        {"params": ps, "weight_decay": decay, "lr": LR, "betas": BETAS, "eps": EPS}
        for ps, decay in groups_of(model)
    ]
    kind = Reference if config.is_exact else PublishedReference
    reference = kind(groups, config, max_norm=MOST_NORM)
    order = [p for ps, _ in groups_of(model) for p in ps]
    places = [next(i for i, p in enumerate(model.parameters()) if p is q) for q in order]
    found = []
    for step, own in enumerate(grads):
        for group in groups:
            group["lr"] = rate(step)
        reference.step([own[place] for place in places])
        weights = dict(zip(places, reference.weights, strict=True))
        found.append([weights[i].clone() for i in range(len(weights))])
    return found


@pytest.mark.parametrize(
    ("rule", "preset", "changes"),
    [
        (PUBLISHED, "zenflow_paper", {}),
        *(
            (
                Rule(name="late", interval=interval, lag=int(overlaps), fresh="factored"),
                "zenflow",
                {"update_interval": interval, "overlap_step": overlaps},
            )
            for interval, overlaps in ((1, True), (3, True), (4, True), (4, False))
        ),
    ],
)
def test_the_rules_are_those_of_the_engines_reference(rule, preset, changes):
    """In blocks of whole matrices: second moments of rows are a block's here."""
    kept = {"min_split_elements": 64, "topk_ratio": 0.25, "select_interval": 6}
    config = ZenFlowConfig.preset(preset, **kept, block_elements=10**6, **changes)
    grads = make_grads(make_model())
    assert_same(trained(rule, config, grads), referred(config, grads))


def test_the_former_rule_is_that_of_a_plain_loop():
    """All columns of one matrix deferred: moments each step, weights n = 4 steps at once."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(3, 5, generator=generator)
    grads = [torch.randn(3, 5, generator=generator) for _ in range(STEPS)]
    (beta1, beta2), interval, due = BETAS, 4, 4
    block = FormerBlock(weight.clone(), FORMER, 0)
    block.due = due
    seen, master, m, v, upload = weight.clone(), weight.clone(), 0.0, 0.0, None
    for t, grad in enumerate(grads, 1):
        block.device(t, grad, grad.square().sum(0), 1.0, HYPER)
        block.length += 1
        block.host(t, grad, grad.square().sum(0), 1.0, HYPER)
        if t == block.due:
            block.close(t, HYPER)
            block.land, block.due, block.length = t + 1, t + interval, 0
        seen = seen if upload is None else upload
        m, v, upload = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2, None
        if t == due:
            step = 4 * LR * m / (1 - beta1**t) / ((v / (1 - beta2**t)) ** 0.5 + EPS)
            master = master * (1 - 4 * LR * DECAY) - step
            upload, due = master - step * (1 + 3 / 2) / 4, t + interval
        torch.testing.assert_close(block.weight, seen, rtol=1e-5, atol=1e-6)


def test_without_corrections_a_forward_counts_as_any_other():
    rule = Rule(name="plain", interval=2, delay_share=0.0, corrects_bias=False)
    assert rule.lead(0.5, 1) == (0.5 + 0.75) / 2
    assert replace(rule, lag=0).lead(0.5, 1) == (0 + 0.5) / 2
    assert rule.share(0.5, 3, 1) == pytest.approx((1 + 1.5 + 1.75) / 3)
    assert rule.share(0.5, 3, 4) == pytest.approx(rule.share(0.5, 3, 1) * 0.5 / (1 - 0.5**4))


@pytest.mark.parametrize(("part", "steps"), [(0.0, 0.0), (1.0, delay(BETAS[0], 4))])
def test_on_a_constant_gradient_forward_sees_on_average_what_adamw_had(part, steps):
    """The lead of uploads and the shares of fresh gradients add up to AdamW's own motion."""
    model = make_model()
    ones = [[torch.ones_like(p) for p in model.parameters()]] * 160
    config = config_of(topk_ratio=0.0)
    same = {"rate": lambda step: LR, "decay": 0.0}
    rule = replace(LATE, delay_share=part)
    seen, true = (trained(rule, config, ones, true=kind, **same) for kind in (False, True))
    apart = torch.stack([s[0] - t[0] for s, t in zip(seen, true, strict=True)])
    assert (apart[-4:].mean(0) - steps * LR).abs().max() < 1e-3 * LR
    assert apart[-4:].abs().max() > 0.1 * LR


def test_a_bound_holds_each_fresh_term_to_a_step():
    rule = Rule(name="bound", interval=4, bound=1e-3)
    config = config_of(topk_ratio=0.0)
    seen, free = trained(rule, config), trained(LATE, config)
    none = trained(Rule(name="none", fresh="none"), config)
    moved = (seen[0][0] - none[0][0]).abs().max()
    assert 0 < moved <= 1.01e-3 * LR < (free[0][0] - none[0][0]).abs().max()


def rows_of(losses):
    """Return rows of trainings: (rule, S, seed) and the loss."""
    return [
        {"regime": "from scratch", "lr": 1e-3, "seed": seed, "variant": name, "interval": interval,
         "eval_loss": loss}
        for (name, interval, seed), loss in losses.items()
    ]  # fmt: skip


def test_runs_are_compared_with_adamw_s_of_the_same_seed():
    rows = rows_of({
        (ADAMW, 1, 0): 2.0, (ADAMW, 1, 1): 4.0, (FRESH, 4, 0): 2.02, (FRESH, 4, 1): 4.12,
        (NO_FRESH, 4, 0): 2.5,
    })  # fmt: skip
    (group,) = STUDY.summarise(rows, {})["groups"]
    fresh, none = group["rules"]
    assert (fresh["excess"], fresh["least"], fresh["most"]) == pytest.approx((0.02, 0.01, 0.03))
    assert (none["excess"], none["seeds"]) == (pytest.approx(0.25), 1)
    (finding,) = STUDY.findings({"groups": [group]})
    assert finding.verdict is Verdict.FAILS
    held = rows_of({(ADAMW, 1, 0): 2.0, (FRESH, 4, 0): 2.019})
    assert STUDY.findings(STUDY.summarise(held, {}))[0].verdict is Verdict.HOLDS


def test_every_run_of_the_study_is_another_and_has_its_rule_s_window():
    cells = STUDY.cells(STUDY.scope(Scope(seeds=(0, 1))))
    assert len({cell.slug for cell in cells}) == len(cells)
    for cell in cells:
        rule = rule_of(cell.labels["variant"], cell.settings["interval"])
        assert (rule is None) == (cell.work.strategy == "on_device")
        if rule is not None:
            assert cell.work.config(None).update_interval == rule.interval
