"""Every column's every gradient is applied exactly once, whoever owns the column by then.

With betas of 0 and lr = eps = 2**40, Adam is a linear rule: sqrt(v) vanishes beside eps in
float32, so a weight moves by minus its mean gradient times the learning rate's scale, which
`linear` makes the window's length again. Gradients are integers that every window length divides,
so sums, means and weights are exact, and a weight's value tells which gradients are in it: those
of the steps up to some T, each once. A lost, doubled or misplaced column fits no T.
"""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import GivenGradients, closing
from tests.reference import Reference
from tests.zenflow.decisions import decisions
from tests.zenflow.test_reference import feed
from zenflow import LoggedDecisions, ZenFlowAdamW, ZenFlowConfig

LINEAR = {"lr": 2.0**40, "betas": (0.0, 0.0), "eps": 2.0**40, "weight_decay": 0.0}
MAX_INTERVAL = 4
MAX_WINDOW = 7  # three steps, then a change that puts the end four steps off
DIVISIBLE = 420  # by every window length up to 7
SHAPES = [(5,), (4, 9), (1, 6), (3, 2, 4), (2, 30)]


@st.composite
def linear_configs(draw):
    """Draw configurations that reselect often."""
    window, overlap = draw(st.integers(1, MAX_INTERVAL)), draw(st.booleans())
    return ZenFlowConfig(
        topk_ratio=draw(st.sampled_from([0.0, 0.2, 0.5, 0.8])),
        update_interval=window,
        overlap_step=overlap,
        lag=draw(st.none() | st.integers(1, window)),
        rolling=draw(st.booleans()),
        select_interval=draw(st.integers(1, 4)),
        deferred_moments="window",
        prediction=draw(st.sampled_from([0.0, 1.0])) if overlap else 0.0,
        full_warm_up_rounds=draw(st.sampled_from([0, 2])),
        importance_decay=draw(st.sampled_from([0.0, 0.5])),
        hysteresis=0.0,
        min_split_elements=1,
        block_elements=draw(st.none() | st.integers(2, 40)),
    )


def integer_gradients(shapes, step, seed):
    """Return integers, with other columns large in every step, so that owners change often."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    grads = []
    for shape in shapes:
        rows = torch.randint(-6, 7, shape, generator=generator)
        columns = torch.randint(1, 12, shape[1:], generator=generator)
        missing = torch.rand((), generator=generator) < 0.15
        grads.append(None if missing else (DIVISIBLE * rows * columns).float())
    return grads


class Ledger:
    """Sums of gradients by step, against which weights are read."""

    def __init__(self, shapes):
        self.sums = [[torch.zeros(shape).reshape(shape[0], -1)] for shape in shapes]

    def add(self, grads):
        for sums, grad in zip(self.sums, grads, strict=True):
            sums.append(sums[-1] if grad is None else sums[-1] + grad.view(sums[-1].shape))

    def last_applied(self, index, weight_OI):
        """Return for each column the largest T such that its value is minus the sum up to T.

        Raises:
            AssertionError: A column's value is no such sum.
        """
        sums_TOI = torch.stack(self.sums[index])
        matches_TI = (sums_TOI == -weight_OI.view(sums_TOI[0].shape)).all(dim=1)
        bad = (~matches_TI.any(dim=0)).nonzero().flatten().tolist()
        assert not bad, f"columns {bad} of parameter {index}: a gradient was lost or applied twice"
        steps_T1 = torch.arange(len(sums_TOI)).unsqueeze(1)
        return torch.where(matches_TI, steps_T1, -1).amax(dim=0)


def run_linear(config, log, mode, seed, num_steps=18):
    """Train with integer gradients and read, after every step, what the weights contain."""
    model, ledger = GivenGradients(SHAPES, scale=0.0), Ledger(SHAPES)
    log = decisions(config, log)
    longest = MAX_WINDOW if log else config.update_interval
    settings = {"max_grad_norm": None} if mode == "release" else {}
    optimizer = ZenFlowAdamW(
        model.parameters(), config=config, controller=LoggedDecisions(log), **LINEAR, **settings
    )
    before = [torch.zeros(sums[0].shape[1]) for sums in ledger.sums]
    with closing(optimizer):
        for step in range(1, num_steps + 1 + longest):
            grads = integer_gradients(SHAPES, step, seed)
            if step > num_steps:  # close every window, with nothing more to apply
                grads = [torch.zeros(shape) for shape in SHAPES]
            feed(model, optimizer, grads, mode)
            ledger.add(grads)
            seen = [p.detach().clone() for p in model.parameters()]
            optimizer.eval()
            for index, p in enumerate(model.parameters()):
                applied = ledger.last_applied(index, p.detach())
                assert (applied >= before[index]).all(), "an applied gradient was taken back"
                assert (applied > step - longest).all(), "a gradient waited longer than a window"
                before[index] = applied
                if not config.prediction:
                    landed = ledger.last_applied(index, seen[index])
                    late = longest - 1 + config.effective_lag(MAX_INTERVAL if log else longest)
                    assert (landed >= step - late).all(), "an update landed too late"
            optimizer.train()
            for p, weight in zip(model.parameters(), seen, strict=True):
                assert torch.equal(p, weight), "eval() and train() changed a weight"
        optimizer.eval()
        for p, sums in zip(model.parameters(), ledger.sums, strict=True):
            assert torch.equal(p.detach().view(sums[-1].shape), -sums[-1])


@st.composite
def changes(draw, config):
    """Draw decisions of a controller, far enough apart for every block's window to end between."""
    possible = {"update_interval": st.integers(1, MAX_INTERVAL), "rolling": st.booleans()}
    if config.topk_ratio:
        possible["topk_ratio"] = st.sampled_from([0.1, 0.2, 0.5, 0.8])
    drawn = draw(st.lists(st.fixed_dictionaries({}, optional=possible), max_size=2))
    return [(draw(st.integers(1, 6)) + 11 * i, changed) for i, changed in enumerate(drawn)]


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    config=linear_configs(),
    mode=st.sampled_from(["keep", "release"]),
    seed=st.integers(0, 10**6),
)
def test_every_gradient_of_every_column_is_applied_exactly_once(data, config, mode, seed):
    run_linear(config, data.draw(changes(config)), mode, seed)


def test_these_gradients_do_make_columns_change_owners():
    """Guard the test above: without reselections it would show little."""
    config = ZenFlowConfig(
        topk_ratio=0.5,
        update_interval=2,
        select_interval=1,
        importance_decay=0.0,
        hysteresis=0.0,
        min_split_elements=1,
    )
    groups = [{"params": [torch.zeros(4, 9, requires_grad=True)], **LINEAR}]
    reference, owners = Reference(groups, config), []
    for step in range(1, 21):
        reference.step(integer_gradients([(4, 9)], step, seed=3))
        owners.append(torch.cat([b.important for b in reference.blocks]))
    changes = sum(bool((a != b).any()) for a, b in itertools.pairwise(owners))
    assert changes >= 5
