"""What is refused is refused with the error that the table has, and torch does what it says."""

import pytest
import torch
from torch import nn

from tests.zenflow.conformance.refusals import OF_RELEASE_MODE, REFUSALS
from tests.zenflow.conformance.subjects import affine, train

ALL = [refusal for group in REFUSALS.values() for refusal in group]


def what(case):
    return getattr(case, "what", None)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("refusal", ALL, ids=what)
def test_what_the_table_lists_is_refused_with_its_message(make, refusal):
    with pytest.raises(refusal.error) as caught:
        refusal.call(make)
    assert type(caught.value) is refusal.error
    assert str(caught.value).startswith(refusal.says)


@pytest.mark.parametrize("refusal", OF_RELEASE_MODE, ids=what)
def test_what_release_mode_refuses_is_taken_in_keep_mode(make, refusal):
    def call():
        refusal.call(make)

    if make([nn.Parameter(torch.ones(2))]).releases_gradients:
        with pytest.raises(refusal.error) as caught:
            call()
        assert type(caught.value) is refusal.error
        assert str(caught.value).startswith(refusal.says)
    else:
        call()


@pytest.mark.filterwarnings("error:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("refusal", [*ALL, *OF_RELEASE_MODE], ids=what)
def test_torch_s_adamw_does_what_the_table_says(refusal):
    if refusal.torch is None:
        refusal.call(torch.optim.AdamW)
        return
    with pytest.raises(refusal.torch) as caught:
        refusal.call(torch.optim.AdamW)
    assert type(caught.value) is refusal.torch is not refusal.error


# ---- refused by both ----------------------------------------------------------------------------


def one():
    return nn.Parameter(torch.ones(4, 5))


BY_BOTH = {
    "a tensor instead of parameters": (lambda make: make(one()), TypeError),
    "no parameters": (lambda make: make([]), ValueError),
    "something else than a tensor": (lambda make: make([3]), TypeError),
    "a result, not a parameter": (lambda make: make([one() * 2]), ValueError),
    "a parameter in two groups": (
        lambda make: make([{"params": p} for p in [one()] * 2]),
        ValueError,
    ),
    "names for some": (lambda make: make([("weight", one()), one()]), ValueError),
    "names in some groups": (
        lambda make: make([{"params": [one()]}, {"params": [("bias", one())]}]),
        ValueError,
    ),
    "a text for lr": (lambda make: make([one()], lr="1e-3"), TypeError),
    "a negative lr": (lambda make: make([one()], lr=-1.0), ValueError),
    "an lr that is no number": (lambda make: make([one()], lr=float("nan")), ValueError),
    "two learning rates": (lambda make: make([one()], lr=torch.ones(2)), ValueError),
    "beta1 of 1": (lambda make: make([one()], betas=(1.0, 0.0)), ValueError),
    "beta2 of 1": (lambda make: make([one()], betas=(0.9, 1.0)), ValueError),
    "three betas": (lambda make: train(*solved(make, betas=(0.9, 0.99, 0.5))), ValueError),
    "a negative eps": (lambda make: make([one()], eps=-1.0), ValueError),
    "a negative decay": (lambda make: make([one()], weight_decay=-1), ValueError),
}


def solved(make, **settings):
    problem = affine(**settings)
    return problem, problem.made_by(make)


@pytest.mark.parametrize("name", BY_BOTH)
def test_what_both_refuse_is_the_same_kind_of_error(make, name):
    call, error = BY_BOTH[name]
    for maker in (torch.optim.AdamW, make):
        with pytest.raises(error) as caught:
            call(maker)
        assert type(caught.value) is error


TAKEN = {
    "a number and a tensor as betas": (
        {"betas": (0.9, torch.tensor(0.99))},
        {"betas": (0.9, 0.99)},
    ),
    "a tensor and a number as betas": (
        {"betas": (torch.tensor(0.9), 0.99)},
        {"betas": (0.9, 0.99)},
    ),
    "a tensor lr with foreach": ({"lr": torch.tensor(0.01), "foreach": True}, {"lr": 0.01}),
    "foreach and fused": ({"foreach": True, "fused": True}, {}),
}
"""Settings that torch.optim.AdamW refuses because of its implementations, and what they mean."""


@pytest.mark.parametrize("name", TAKEN)
def test_settings_that_only_torch_s_implementations_exclude_are_taken(make, name):
    given, meant = TAKEN[name]
    with pytest.raises((ValueError, RuntimeError)):
        torch.optim.AdamW([one()], **given)
    results = []
    for settings in (given, meant):
        problem, optimizer = solved(make, **settings)
        train(problem, optimizer, 3)
        results.append(problem.weights())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
