"""Gradients of eight bits: nearest rounding, and equal bits whoever decodes them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.rounded_reference import rounded
from tests.zenflow.host.test_compact import job_of as compact_job_of
from tests.zenflow.host.test_compact import own_backend, results  # noqa: F401
from tests.zenflow.host.test_kernel import assert_same_bits, clone, problem, results_of, select
from zenflow.host import e4m3, kernel
from zenflow.host_state import GROUP, gradient_width


def wide(num_rows, num_elements, seed=0, octaves=20):
    """Return numbers whose sizes differ within a group."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** -(octaves * torch.rand(num_rows, num_elements, generator=generator))
    return sizes * torch.randn(num_rows, num_elements, generator=generator)


def encoded(values):
    out = torch.full((len(values), gradient_width("e4m3", values.shape[1])), 77, dtype=torch.uint8)
    e4m3.encode(values, out)
    return out


@pytest.mark.parametrize("num_elements", [1, 5, 63, 64, 65, 128, 130, 300])
def test_each_number_goes_to_the_nearest_that_its_group_has(num_elements):
    values = wide(7, num_elements)
    found = e4m3.decode(encoded(values))
    assert torch.equal(found, rounded(values.t()).t())
    codes = torch.arange(1, 128, dtype=torch.int32)  # the largest one's exponent is 2^0
    known = torch.cat([torch.zeros(1), (codes + 8 * 112 << 20).view(torch.float32)])
    for row, out in zip(values.double(), found.double(), strict=True):
        for part, own in zip(row.split(GROUP), out.split(GROUP), strict=True):
            scale = 2.0 ** math.frexp(float(own.abs().max()))[1] / 2
            best = (part.abs().unsqueeze(1) - scale * known.double()).abs().amin(1)
            assert torch.equal((own - part).abs(), best)
            assert ((own == 0) | (own.sign() == part.sign())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_are_rounded_by_themselves(dtype):
    values = wide(5, 4 * GROUP + 10).to(dtype)
    whole = e4m3.rounded(values)
    parts = [e4m3.rounded(part) for part in values.split(GROUP, 1)]
    assert torch.equal(whole, torch.cat(parts, 1))


def test_pieces_of_a_large_matrix_are_those_of_the_whole(monkeypatch):
    values = wide(40, 130)
    whole = encoded(values)
    monkeypatch.setitem(e4m3._PIECE_ELEMENTS, "cpu", 500)
    assert torch.equal(encoded(values), whole)


def test_the_mean_of_squares_stays():
    """A second moment of rounded gradients is too large by about a thousandth."""
    values = torch.randn(200, 640, generator=torch.Generator().manual_seed(1))
    ratio = float(e4m3.rounded(values).square().sum() / values.square().sum())
    assert ratio == pytest.approx(1.0, abs=1.5e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_number_that_is_not_finite_is_none(bad):
    values = torch.ones(1, 3 * GROUP)
    values[0, GROUP + 3] = bad
    found = e4m3.rounded(values)
    assert found[0, GROUP : 2 * GROUP].isnan().all()
    assert torch.equal(found[0, :GROUP], values[0, :GROUP])
    assert torch.equal(found[0, 2 * GROUP :], values[0, 2 * GROUP :])


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-38, 1e-36])
def test_numbers_near_the_end_of_the_range_vanish_or_stay_normal(size):
    found = e4m3.rounded(torch.full((1, 70), size))
    assert ((found == 0) | (found >= 2.0**-126)).all()
    assert float(found.max()) == pytest.approx(size, rel=0.04, abs=2.0**-125)


SHAPES = [(1, 1), (3, 5), (9, 64), (40, 7), (5, 65), (4, 200), (3, 513)]


def short(job, seed=0, size=1e-2):
    """Return the job with gradients of eight bits, and with these as float32."""
    shape = job.steps[0].grad.shape
    rows = [encoded(size * wide(*shape, seed=seed + k)) for k in range(len(job.steps))]
    return [
        replace(job, steps=[replace(s, grad=g) for s, g in zip(job.steps, grads, strict=True)])
        for grads in (rows, [e4m3.decode(row) for row in rows])
    ]


def repeated(job):
    """Return the job, whose upload repeats its own last step."""
    return replace(job, upload=replace(job.upload, step=job.steps[-1]))


@pytest.mark.parametrize("name", ["c", "torch"])
@pytest.mark.parametrize(("shape", "num_steps"), [*itertools.product(SHAPES, [1, 3])], ids=str)
def test_a_pass_takes_what_they_stand_for(name, shape, num_steps, monkeypatch):
    select(monkeypatch, name)
    ours, plain = map(repeated, short(problem(*shape, num_steps=num_steps)))
    found, expected = clone(ours), clone(plain)
    kernel.run(found)
    kernel.run(expected)
    assert_same_bits(results_of(found), results_of(expected))


@pytest.mark.parametrize("name", ["c", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_pass_over_compact_state_takes_what_they_stand_for(name, shape, monkeypatch):
    select(monkeypatch, name)
    found, _ = map(repeated, short(compact_job_of(*shape, 3)))
    _, expected = map(repeated, short(compact_job_of(*shape, 3)))
    kernel.run(found)
    kernel.run(expected)
    for ours, theirs in zip(results(found), results(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4, 5, 6)])
def test_a_pass_may_be_cut_between_any_rows(cuts):
    job, _ = map(repeated, short(problem(7, 70)))
    whole, parts = clone(job), clone(job)
    kernel.run(whole)
    for low, high in itertools.pairwise((0, *cuts, 7)):
        kernel.run(parts.rows(low, high))
    assert_same_bits(results_of(parts), results_of(whole))


def test_nan_reaches_the_weights(monkeypatch):
    for name in ("c", "torch"):
        select(monkeypatch, name)
        job, _ = map(repeated, short(problem(3, 70, num_steps=1)))
        job.steps[0].grad[0, 70] = e4m3.NOT_FINITE  # the byte of the first row's first group
        job = clone(job)
        kernel.run(job)
        assert job.master[0, :GROUP].isnan().all()
        assert not job.master[0, GROUP:].isnan().any()
        assert not job.master[1:].isnan().any()


@pytest.mark.parametrize("width", [70, 71, 73])
def test_rows_of_another_length_are_refused(width):
    job = problem(3, 70, num_steps=1)
    grad = torch.zeros(3, width, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"the gradient of step 0 must be .*\(3, 72\)"):
        kernel.run(replace(job, steps=[replace(job.steps[0], grad=grad)]))
