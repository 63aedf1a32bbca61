"""Compact state: what rounding leaves right in the mean, and equal bits whoever computes them."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zenflow.host.test_kernel import DTYPES, NARROW, PLAIN, library_with, select
from zenflow.host import e4m3, kernel, library, torch_kernel
from zenflow.host.compact import CompactState, FactoredCompactState, Rounding, keys_of
from zenflow.host.jobs import AdamStep, Changes, CompactJob, Upload
from zenflow.host_state import GROUP, MOST_WAITING, gradient_width, mark_bytes

SEED = 0xFEDCBA9876543210
KINDS = (CompactState, FactoredCompactState)


@pytest.fixture(autouse=True)
def own_backend(monkeypatch):
    yield
    monkeypatch.undo()
    library._load.cache_clear()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """The kernel as a processor without AVX-512 runs it."""
    return library_with(tmp_path_factory.mktemp("narrow"), NARROW)


def drawn(num_rows, num_elements, step, seed=SEED):
    keys = keys_of(seed, torch.full((num_rows,), step))
    return Rounding.drawn(keys, torch.arange(num_rows) * num_elements, num_elements)


def encoded(weight, exp_avg, exp_avg_sq, rounding, kind=CompactState):
    state = kind.zeros(*weight.shape)
    state.encode(weight, exp_avg, exp_avg_sq[:, : state.exp_avg_sq.shape[1]], rounding)
    return state


def numbers(num_rows, num_elements, seed=0, falls_by=1e-6):
    """Return weights and moments whose sizes fall along a row, so that groups have wide ranges."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(num_rows, num_elements, generator=generator)

    fall = torch.logspace(0, math.log10(falls_by), num_elements)
    exp_avg = 1e-3 * normal() * fall
    return 0.05 * normal(), exp_avg, exp_avg.square() * (0.5 + normal().abs())


def job_of(
    num_rows, num_elements, num_steps, dtype=torch.bfloat16, *, lead=1.3, repeats=True,
    kind=CompactState,
):  # fmt: skip
    """Return a pass in the middle of a training, every row at its own step, some idle."""
    generator = torch.Generator().manual_seed(num_elements)
    shape = num_rows, num_elements
    steps = [
        AdamStep(
            lr=1e-3 * (index + 1), beta1=0.9, beta2=0.999 - 0.01 * index, eps=1e-8 * index,
            decay=1.0 - 1e-4 * index, scale=0.3 + index,
            grad=(1e-2 * torch.randn(shape, generator=generator)).to(dtype),
        )
        for index in range(num_steps)
    ]  # fmt: skip
    other = AdamStep(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-7, decay=1.0)
    is_last = repeats and num_steps > 0
    return CompactJob(
        encoded(*numbers(*shape), Rounding.nearest(), kind), torch.arange(num_rows) // 2 + 1,
        torch.tensor([row % 3 != 1 for row in range(num_rows)], dtype=torch.uint8), steps,
        Upload(torch.full(shape, math.nan, dtype=dtype), lead,
               steps[-1] if is_last else other, is_last),
        0, num_elements, SEED,
    )  # fmt: skip


def results(job):
    return [*job.state.tensors(), job.step, job.upload.out]


def assert_equal(ours, theirs):
    for place, (one, other) in enumerate(zip(results(ours), results(theirs), strict=True)):
        assert torch.equal(one, other), f"tensor {place}"


# ---- the format -------------------------------------------------------------------------------


def test_an_element_takes_five_bytes_and_a_group_two_more():
    assert sum(t.nbytes for t in CompactState.zeros(3, 10 * GROUP).tensors()) == 3 * 10 * (
        5 * GROUP + 2
    )


def test_rounding_is_right_in_the_mean():
    """Of every number within its group's range, and of first moments below it too."""
    values, draws = numbers(4, 3 * GROUP), 4000
    sums = [torch.zeros(4, 3 * GROUP, dtype=torch.float64) for _ in values]
    squares = [torch.zeros_like(total) for total in sums]
    for step in range(draws):
        state = encoded(*values, drawn(4, 3 * GROUP, step))
        for place, found in enumerate(state.numbers()):
            sums[place] += found
            squares[place] += found.double() ** 2
    for name, value, total, square in zip("wmv", values, sums, squares, strict=True):
        mean = total / draws
        error = ((square / draws - mean**2).clamp_min(0) / draws).sqrt()
        is_within = torch.ones_like(value, dtype=torch.bool)
        if name == "v":  # smaller ones become the smallest code's
            largest = value.view(4, 3, GROUP).amax(2).repeat_interleave(GROUP, 1)
            is_within = value > largest * 2.0**-28
        off = (mean - value.double()).abs() > 5 * error + 1e-7 * value.abs()
        assert not (off & is_within).any(), name


def test_numbers_that_are_codes_already_stay_unless_their_group_has_another_range():
    weight, exp_avg, exp_avg_sq = numbers(3, 100, falls_by=0.1)
    once = encoded(weight, exp_avg, exp_avg_sq, Rounding.nearest()).numbers()
    again = encoded(*once, drawn(3, 100, 1)).numbers()
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)


def test_a_second_moment_decays_as_it_should():
    """Nearest rounding would stop it: a step takes a thousandth away, a code is an eighth."""
    beta2, steps = 0.999, 5000
    _, exp_avg, exp_avg_sq = numbers(2, 2 * GROUP, falls_by=1.0)
    state = encoded(torch.zeros_like(exp_avg), exp_avg, exp_avg_sq, Rounding.nearest())
    for step in range(steps):
        weight, first, second = state.numbers()
        state.encode(weight, first, second * beta2, drawn(2, 2 * GROUP, step))
    left = state.numbers()[2].double().sum() / exp_avg_sq.double().sum()
    assert float(left) == pytest.approx(beta2**steps, rel=0.1)


def test_small_updates_of_a_weight_add_up():
    """A tenth of the last place of 24 bits at a time."""
    weight = torch.full((1, GROUP * 4), 0.03)
    zero = torch.zeros_like(weight)
    step = 0.1 * 2.0**-21  # 24 bits have 15 of mantissa, and the weight's exponent is -6
    state = encoded(weight, zero, zero, Rounding.nearest())
    start = state.numbers()[0].double().mean()
    for count in range(1000):
        now = state.numbers()[0]
        state.encode(now + step, zero, zero, drawn(1, GROUP * 4, count))
    moved = state.numbers()[0].double().mean() - start
    assert float(moved) == pytest.approx(1000 * step, rel=0.1)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
def test_groups_of_any_scale_keep_their_numbers(scale):
    weight, exp_avg, _ = numbers(2, 130, falls_by=1e-2)
    exp_avg = exp_avg * scale if scale < 1 else exp_avg * scale**0.5
    exp_avg_sq = exp_avg.square().clamp_min(1e-37)
    found = encoded(weight, exp_avg, exp_avg_sq, Rounding.nearest()).numbers()
    for name, value, size in zip("wm", (weight, exp_avg), (2**-16, 2**-4), strict=True):
        assert ((found["wm".index(name)] - value).abs() <= size * 1.001 * value.abs()).all(), name
    assert torch.isfinite(torch.stack(found)).all()
    assert (found[2] > 0).all()


def test_random_bits_are_the_elements_own_and_differ_by_step_and_seed():
    whole = drawn(1, 300, 5)
    keys = keys_of(SEED, torch.tensor([5]))
    part = Rounding.drawn(keys, torch.tensor([128]), 100)
    for one, other in zip(whole.bits, part.bits, strict=True):
        assert torch.equal(one[:, 128:228], other)
    others = (drawn(1, 300, 6), drawn(1, 300, 5, seed=SEED + 1))
    for other in others:
        assert (whole.bits[1] != other.bits[1]).float().mean() > 0.99
    means = [float(bits.double().mean()) for bits in drawn(1, 10**5, 9).bits]
    assert means == pytest.approx([127.5, 2**19, 2**19], rel=0.01)


# ---- the kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [0.0, 1.3])
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_c_and_torch_give_equal_bits(monkeypatch, narrow, kind, dtype, repeats, lead):
    select(monkeypatch, "c")
    own = library.c_library()
    shapes = (
        (5, 150, 3),
        (7, GROUP, 1),
        (3, 1, 2),
        (4, 63, 4),
        (6, 300, 0),
        (2, 700, MOST_WAITING),
    )
    for num_rows, num_elements, num_steps in shapes:
        theirs, *ours = (
            job_of(num_rows, num_elements, num_steps, dtype, lead=lead, repeats=repeats, kind=kind)
            for _ in range(3)
        )
        torch_kernel.run(theirs)
        for used, job in zip((own, narrow), ours, strict=True):
            monkeypatch.setattr(library, "_load", lambda used=used: used)
            kernel.run(job)
            assert_equal(job, theirs)


def rare(job, kind):
    """Give a job numbers that few groups have."""
    generator = torch.Generator().manual_seed(1)
    place = torch.rand(job.state.high.shape, generator=generator)
    if kind == "any code":
        for tensor in job.state.tensors():
            bytes_ = tensor.view(torch.uint8)
            bytes_.copy_(torch.randint(0, 255, bytes_.shape, generator=generator))
    for step in job.steps:
        if kind == "zeros":
            step.grad.mul_(place > 0.7)
        elif kind == "wide":
            step.grad.mul_(10 ** (-9 * place))
        elif kind == "huge":
            step.grad.mul_(10 ** (21 * place))
        elif kind == "at the end of the range":
            step.grad.mul_(10 ** (40 * place))
        elif kind == "not finite":
            for number, share in ((math.inf, 0.01), (-math.inf, 0.02), (math.nan, 0.03)):
                step.grad[(place > share) & (place < share + 0.005)] = number
            step.grad.view(torch.int16)[:, 7::97] = -1  # NaN of the largest payload
    if kind == "zeros":
        job.state.high[place < 0.2] = -0.0
        job.state.low[place < 0.2] = 0
        for tensor in (job.state.exp_avg, job.state.exp_avg_sq):
            tensor.mul_((place[:, : tensor.shape[1]] > 0.3).to(torch.uint8))


def short_gradients(job):
    """Return the job with gradients of eight bits."""
    steps = []
    for step in job.steps:
        rows, num_elements = step.grad.shape
        grad = torch.empty(rows, gradient_width("e4m3", num_elements), dtype=torch.uint8)
        e4m3.encode(step.grad, grad)
        steps.append(replace(step, grad=grad))
    return replace(job, steps=steps)


def marked(job):
    """Return the job with an upload that marks what it changes."""
    marks = torch.zeros(len(job.step), mark_bytes(job.state.high.shape[1]), dtype=torch.uint8)
    changes = Changes(marks, 0.7, AdamStep(2e-3, 0.8, 0.9, 1e-6, 1.0))
    return replace(job, upload=replace(job.upload, is_repeatable=True, changes=changes))


def raw(job):
    changes = job.upload.changes
    found = [tensor.view(torch.uint8) for tensor in (*job.state.tensors(), job.upload.out)]
    return found if changes is None else [*found, changes.marks]


def test_rare_numbers_give_equal_bits_by_all_instructions(monkeypatch, tmp_path, narrow):
    """Zeros, infinities, NaN, and codes that no training writes, in either kind of state."""
    select(monkeypatch, "c")
    libraries = library_with(tmp_path, PLAIN), narrow, library.c_library()
    kinds = ("any code", "zeros", "wide", "huge", "at the end of the range", "not finite")
    for kind, change, num_steps, of_state in itertools.product(
        kinds, (lambda job: job, short_gradients, marked), (0, 1, 3), KINDS
    ):
        found = []
        for used in libraries:
            job = job_of(4, 3 * GROUP + 5, num_steps, kind=of_state)
            rare(job, kind)
            job = change(job)
            monkeypatch.setattr(library, "_load", lambda used=used: used)
            kernel.run(job)
            found.append(raw(job))
        plain, *others = found
        for other in others:
            for place, pair in enumerate(zip(plain, other, strict=True)):
                assert torch.equal(*pair), f"{kind}, {num_steps} steps, tensor {place}"


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").is_file() or "avx2" not in Path("/proc/cpuinfo").read_text().split(),
    reason="needs Linux on a processor with AVX2",
)
def test_a_build_may_leave_avx512_out(narrow):
    assert narrow.zenflow_instruction_set() == b"AVX2"


def test_moments_of_zero_stay_zero(monkeypatch, tmp_path, narrow):
    """Four million elements draw each number of 20 bits several times."""
    select(monkeypatch, "c")
    shape = 64, 2**16
    zeros = torch.zeros(shape)
    for used in (library_with(tmp_path, PLAIN), narrow, library.c_library()):
        job = CompactJob(
            CompactState.zeros(*shape), torch.zeros(64, dtype=torch.int64),
            torch.ones(64, dtype=torch.uint8), [AdamStep(1e-3, 0.9, 0.95, 1e-8, 1.0, 1.0, zeros)],
            None, 0, shape[1], SEED,
        )  # fmt: skip
        monkeypatch.setattr(library, "_load", lambda used=used: used)
        kernel.run(job)
        assert not job.state.exp_avg.any()
        assert not job.state.exp_avg_sq.any()


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 12), max_size=4),
    num_elements=st.integers(1, 200),
    kind=st.sampled_from(KINDS),
)
def test_rows_may_be_cut_anywhere(cuts, num_elements, kind):
    whole, cut = (job_of(13, num_elements, 3, kind=kind) for _ in range(2))
    kernel.run(whole)
    for low, high in itertools.pairwise(sorted({0, 13, *cuts})):
        kernel.run(cut.rows(low, high))
    assert_equal(whole, cut)


def test_a_pass_is_adamw_on_the_numbers_that_codes_mean():
    job = job_of(6, 150, 3)
    before = job.state.numbers()
    plain = replace(job, state=job.state.rows(slice(None)))
    kernel.run(plain)
    for row in range(6):
        if not job.active[row]:
            for one, other in zip(before, plain.state.numbers(), strict=True):
                assert torch.equal(one[row], other[row])
    moved = plain.state.numbers()[0] - before[0]
    assert moved[0].abs().max() > 1e-4


def test_what_does_not_fit_is_refused():
    job = job_of(3, 70, 1)
    state = job.state.rows(slice(None))
    state.exp_avg_exponent = torch.zeros(3, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"exp_avg_exponent must be uint8, of shape \(3, 2\)"):
        kernel.run(replace(job, state=state))
    with pytest.raises(ValueError, match="64 steps at most"):
        kernel.run(replace(job, steps=job.steps * (MOST_WAITING + 1)))
