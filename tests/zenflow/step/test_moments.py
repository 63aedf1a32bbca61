"""The host's moments are AdamW's, at every step, whoever owns the column by then.

Given the same gradients, first and second moment and step count do not depend on the weights. So
they can be compared with torch's own, element by element: a gradient that is lost, used twice,
scaled wrongly or put into another column's row shows.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import GivenGradients, closing
from tests.zenflow.decisions import schedules
from tests.zenflow.test_reference import configs, feed
from zenflow import LoggedDecisions, ZenFlowAdamW

SHAPES = [(5,), (4, 9), (1, 6), (3, 2, 4), (2, 30)]
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95)}


def moments_of(state, shape):
    """Return (exp_avg, exp_avg_sq, step by column) of one parameter, columns in their order."""
    if "deferred_columns" not in state:
        return state["exp_avg"], state["exp_avg_sq"], state["step"]
    found = []
    for name in ("exp_avg", "exp_avg_sq", "step"):
        rows = torch.cat([state[name], state[f"device_{name}"]])
        columns = torch.cat([state["deferred_columns"], state["important_columns"]])
        found.append(rows[columns.argsort()])
    exp_avg, exp_avg_sq, step = found
    return exp_avg.t().reshape(shape), exp_avg_sq.t().reshape(shape), step


@settings(max_examples=12, deadline=None)
@given(
    mode=st.sampled_from(["keep", "release"]),
    data=st.data(),
    config=configs(update_rule="exact"),
    absent=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 10**6),
)
def test_moments_are_those_of_torch_at_every_step(mode, data, config, absent, seed):
    model, twin = GivenGradients(SHAPES, seed=seed), GivenGradients(SHAPES, seed=seed)
    theirs = torch.optim.AdamW(twin.parameters(), **HYPER)
    controller = LoggedDecisions(data.draw(schedules(config, last=9)))
    release = {"max_grad_norm": 0.5, "offload_gradients": mode} if mode == "release" else {}
    ours = ZenFlowAdamW(
        model.parameters(), config=config, controller=controller, **HYPER, **release
    )
    with closing(ours):
        for step in range(1, 12):
            grads = model.draw_gradients(step, seed, absent)
            feed(model, ours, grads, mode, max_norm=0.5)
            for p, grad in zip(twin.parameters(), grads, strict=True):
                p.grad = None if grad is None else grad.clone()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            theirs.step()
            ours.synchronize()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                if not theirs.state[q]:
                    continue
                exp_avg, exp_avg_sq, count = moments_of(ours.state[p], p.shape)
                expected = theirs.state[q]
                torch.testing.assert_close(exp_avg, expected["exp_avg"], rtol=2e-6, atol=1e-8)
                torch.testing.assert_close(exp_avg_sq, expected["exp_avg_sq"], rtol=4e-6, atol=0)
                assert (count == expected["step"]).all()
