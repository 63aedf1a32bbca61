"""Stability limits against closed forms, and curvature against a matrix written out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from evidence.studies.late_updates import limits
from evidence.studies.late_updates.curvature import hessian_product, largest_eigenvalue
from evidence.studies.late_updates.limits import (
    adamw_limit,
    first_failure,
    growth,
    limit,
    noise,
)
from evidence.studies.late_updates.rules import LateBlock, Rule
from evidence.studies.late_updates.stability import STUDY, rule_of
from experiments.lab.finding import Verdict
from experiments.lab.study import Scope
from experiments.training.parts.data.batches import Batch
from zenflow.rule.adamw import Hyper

ADAMW = Rule(name="AdamW", interval=1, lag=0, fresh="none")
LATE = Rule(name="late step", interval=1, fresh="none", lead_share=0.0)
FRESH = Rule(name="fresh", interval=1)
COARSE = 0.02
"""Relative: limits are looked for to 1%."""


def test_adamw_s_limit_is_the_textbook_s():
    assert adamw_limit(0.9) == pytest.approx(38.0)
    for beta1 in (0.5, 0.8, 0.9):
        assert limit(ADAMW, beta1) == pytest.approx(adamw_limit(beta1), rel=COARSE)


@pytest.mark.parametrize("curvature", [0.5, 0.9, 1.1, 5.0])
def test_a_late_step_s_eigenvalues_are_the_roots_of_its_polynomial(curvature):
    beta1 = 0.9
    # (z - 1) (z - beta1) + (1 - beta1) x; without delay the last term is (1 - beta1) x z
    roots = np.roots([1.0, -(1 + beta1), beta1 + (1 - beta1) * curvature])
    assert growth(LATE, curvature, beta1) == pytest.approx(max(np.abs(roots)), rel=1e-6)
    assert (growth(LATE, curvature, beta1) > 1) == (curvature > 1)


def test_with_windows_of_one_step_the_fresh_gradient_gives_all_of_adamw_s_limit_back():
    assert limit(FRESH) == pytest.approx(limit(ADAMW), rel=COARSE)
    assert limit(LATE) == pytest.approx(1.0, rel=COARSE)


def test_the_quadratic_s_map_is_what_the_rule_s_blocks_do():
    """Two blocks of one column each, trained on the quadratic, follow the map's powers."""
    rule = Rule(name="fresh", interval=2)
    curvature, share = 3.0, 0.5**0.5
    # So old a step, and so large an epsilon, that both corrections and both moments are constant.
    old, hyper = 10**6, Hyper(lr=1.0, beta1=0.9, beta2=0.95, eps=1.0, weight_decay=0.0)
    tiny = 1e-12
    blocks = [LateBlock(torch.full((1, 1), tiny, dtype=torch.float64), rule, 0) for _ in range(2)]
    for phase, block in enumerate(blocks, 1):
        block.due = old + phase
    model = limits._Quadratic(rule, 0.9)
    start = np.array([tiny] * 6 + [0.0] * 2)  # what is seen, masters, uploads; moment, sum
    for t in range(1, 7):
        seen = sum(share * float(block.weight) for block in blocks)
        grad = torch.full((1, 1), curvature * share * seen, dtype=torch.float64)
        for block in blocks:
            block.device(old + t, grad, grad.square().sum(0), 1.0, hyper)
        for block in blocks:
            block.host(old + t, grad, grad.square().sum(0), 1.0, hyper)
            if old + t == block.due:
                block.close(old + t, hyper)
                block.land, block.due = old + t + 1, block.due + 2
        model.step(t, curvature)
        expected = (model.state() @ start)[:2]
        assert [float(b.weight) for b in blocks] == pytest.approx(list(expected), rel=1e-6)


@pytest.mark.parametrize("curvature", [0.1, 1.0, 10.0])
def test_adamw_s_noise_is_that_of_its_linear_map(curvature):
    """The stationary covariance P of (master, moment) solves P = A P A' + b b'."""
    beta1 = 0.9
    moment = np.array([(1 - beta1) * curvature, beta1])
    step = np.array([[1.0, 0.0] - moment, moment])
    pushed = np.array([-(1 - beta1), 1 - beta1])
    flat = np.linalg.solve(np.eye(4) - np.kron(step, step), np.outer(pushed, pushed).ravel())
    assert limits._squares(ADAMW, curvature, beta1) == pytest.approx(flat[0], rel=1e-6)


def test_the_delay_keeps_noise_and_limits_nearer_to_adamw_s():
    for interval in (2, 4, 8, 16):
        late = Rule(name="late", interval=interval)
        early = replace(late, delay_share=0.0)
        apart = [
            max(abs(math.log(noise(rule, curvature))) for curvature in (0.3, 1.0, 2.0))
            for rule in (late, early)
        ]
        assert apart[0] < 0.7 * apart[1]
        assert limit(late) > limit(early)
        longer = replace(late, delay_share=1.3)
        assert noise(longer, 2.0) > noise(late, 2.0)
        assert noise(longer, 0.1) > noise(late, 0.1) > 1
    assert noise(FRESH, 1.0) == pytest.approx(1.0)
    assert noise(LATE, 2.0) == math.inf


def test_the_first_failure_is_found_between_coarse_values():
    assert first_failure(lambda value: value < 7.3) == pytest.approx(7.3, rel=0.01)
    with pytest.raises(ValueError, match="unstable at"):
        first_failure(lambda value: False)


def test_the_largest_eigenvalue_is_not_the_largest_in_size():
    values = torch.tensor([-50.0, -1.0, 0.5, 2.0, 7.0])
    turned, _ = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(3)))
    matrix = turned @ values.diag() @ turned.T
    assert largest_eigenvalue(lambda v: matrix @ v, 5) == pytest.approx(7.0, rel=1e-4)


class Logits(nn.Module):
    """A table of logits for each token: its Hessian is known."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.table[input_ids]})


def test_the_hessian_s_product_is_that_of_the_softmax():
    model = Logits()
    batch = Batch(inputs=torch.tensor([[0, 1]]), targets=torch.tensor([[2, 3]]))
    vector = torch.randn(3, 4)
    (found,) = hessian_product(model, [model.table], [batch, batch], [vector])
    shares = model.table.detach().softmax(1)
    expected = torch.zeros(3, 4)
    for row in (0, 1):
        p = shares[row]
        expected[row] = 0.5 * (p * vector[row] - p * (p @ vector[row]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_every_named_rule_exists_and_the_claims_are_judged():
    assert rule_of("AdamW", 1) is None
    rows = [
        {"part": "limit", "rule": name, "interval": s, "limit": value}
        for name, s, value in (
            ("AdamW", 1, 37.7), ("late step", 1, 0.99), ("late step, best lead", 4, 1.4),
        )
    ]  # fmt: skip
    run = {"part": "curvature", "rule": "AdamW", "interval": 1, "seed": 0, "eval_loss": 2.0}
    data = STUDY.summarise([*rows, {**run, "points": [[20, 6.5], [80, 14.0]]}], {})
    found = STUDY.findings(data)
    assert [finding.verdict for finding in found] == [Verdict.HOLDS] * 4
    assert found[2].measured == pytest.approx(14.0 / 0.99)
    none = STUDY.summarise([*rows, {**run, "points": [[20, 0.5]]}], {})
    assert STUDY.findings(none)[2].verdict is Verdict.FAILS


def test_cells_differ_and_trainings_have_the_rule_s_window():
    cells = STUDY.cells(STUDY.scope(Scope()))
    assert len({cell.slug for cell in cells}) == len(cells)
    for cell in cells:
        if cell.settings["part"] == "curvature":
            assert cell.work.config(None).update_interval == cell.settings["interval"]
            assert math.isclose(cell.work.lr, cell.settings["lr"])
