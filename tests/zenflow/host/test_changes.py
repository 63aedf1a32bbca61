"""Marks of changed weights: those in which an upload differs from the one before, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zenflow.host.test_compact import encoded, numbers
from tests.zenflow.host.test_kernel import own_backend, select  # noqa: F401
from zenflow.host import changes, kernel
from zenflow.host.compact import Rounding
from zenflow.host.float_state import FloatState
from zenflow.host.jobs import AdamStep, CatchUpJob, Changes, CompactJob, Upload
from zenflow.host.pool import HostPool
from zenflow.host_state import mark_bytes

SETTINGS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
SHAPES = [(3, 1), (2, 63), (4, 64), (5, 65), (3, 130), (2, 300)]


def states_of(shape, *, is_compact):
    values = numbers(*shape)
    if is_compact:
        return encoded(*values, Rounding.nearest())
    return FloatState(*values)


def gradient(shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def job_of(state, count, steps, upload):
    active = torch.tensor([row % 3 != 1 for row in range(len(count))], dtype=torch.uint8)
    if isinstance(state, FloatState):
        return CatchUpJob(*state.tensors(), count, active, steps, upload)
    return CompactJob(state, count, active, steps, upload, 0, state.high.shape[1], 7)


def run(job, pool=None):
    if pool is None:
        kernel.run(job)
    else:
        pool.run([job.encode()])


def windows(shape, lrs, dtype, *, is_compact, marks, pool=None):
    """Yield (upload, its marks) of windows, of two steps each, with their rates and leads."""
    state, count = states_of(shape, is_compact=is_compact), torch.arange(shape[0]) // 2
    out, before = torch.full(shape, 3.0, dtype=dtype), None
    for window, lr in enumerate(lrs):
        steps = [
            AdamStep(lr=lr, decay=1 - 0.1 * lr, grad=gradient(shape, 2 * window + i, dtype),
                     **SETTINGS)
            for i in (0, 1)
        ]  # fmt: skip
        lead = (1.3, 0.0, 0.4)[window % 3]
        upload = Upload(out, lead, replace(steps[-1], grad=None), True, is_repeatable=True)
        found = None
        if marks and before is not None:
            found = torch.full((shape[0], mark_bytes(shape[1])), 255, dtype=torch.uint8)
            upload = replace(upload, changes=Changes(found, *before))
        run(job_of(state, count, steps, upload), pool)
        before = lead, upload.step
        yield out.clone(), found
        out.fill_(torch.nan)  # where an upload waits there is anything


LRS = st.lists(st.sampled_from([0.0, 1e-6, 1e-4, 1e-2]), min_size=2, max_size=5)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from(SHAPES), lrs=LRS, dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    is_compact=st.booleans(), backend=st.sampled_from(["c", "torch"]),
    threads=st.sampled_from([0, 2]),
)  # fmt: skip
def test_the_upload_before_and_changed_weights_make_the_upload(
    shape, lrs, dtype, is_compact, backend, threads
):
    with pytest.MonkeyPatch.context() as patch:
        select(patch, backend)
        pool = HostPool.open(threads) if threads and backend == "c" else None
        here = None
        ways = (
            windows(shape, lrs, dtype, is_compact=is_compact, marks=marks, pool=pool)
            for marks in (False, True)
        )
        for (whole, _), (own, marks) in zip(*ways, strict=True):
            assert torch.equal(whole.view(torch.int16), own.view(torch.int16))
            if marks is None:
                here = whole.clone()
                continue
            is_marked = changes.marked(marks, shape[1])
            assert torch.equal(is_marked, here.view(torch.int16) != whole.view(torch.int16))
            values = changes.gather(own, marks)
            if values is None:
                is_less = 2 * is_marked.sum() + marks.nbytes <= own.nbytes
                assert is_marked.float().mean() > changes.MOST_CHANGED or not is_less
                assert torch.equal(own, whole)
                here = whole.clone()
            else:
                assert values.nbytes + marks.nbytes <= own.nbytes
                assert torch.equal(values, whole[is_marked])
                changes.put(here, marks, values)
                assert torch.equal(here.view(torch.int16), whole.view(torch.int16))
        if pool is not None:
            pool.close()


@pytest.mark.parametrize("is_compact", [False, True])
def test_both_kernels_mark_the_same_weights(monkeypatch, is_compact):
    found = []
    for backend in ("c", "torch"):
        select(monkeypatch, backend)
        ways = windows((5, 200), [1e-4, 1e-6, 1e-3], torch.bfloat16, is_compact=is_compact,
                       marks=True)  # fmt: skip
        found.append([tensor for pair in ways for tensor in pair if tensor is not None])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_zeros_have_no_sign():
    """A fresh step of 0 on the device would take the sign of a zero weight away."""
    for is_compact, backend in itertools.product([False, True], ["c", "torch"]):
        with pytest.MonkeyPatch.context() as patch:
            select(patch, backend)
            weight = torch.tensor([[-0.0, 1e-45, -1e-44, 2.0]])
            state = FloatState(weight, torch.zeros(1, 4), torch.zeros(1, 4))
            if is_compact:
                state = encoded(weight, *state.tensors()[1:], Rounding.nearest())
            out = torch.ones(1, 4, dtype=torch.bfloat16)
            step = AdamStep(lr=0.0, decay=1.0, **SETTINGS)
            upload = Upload(out, 0.0, step, False, is_repeatable=True)
            run(job_of(state, torch.tensor([0]), [], upload))
            assert out.view(torch.int16).tolist() == [[0, 0, 0, 0x4000]]


def test_an_upload_of_four_bytes_is_not_repeatable():
    state = states_of((2, 64), is_compact=False)
    step = AdamStep(lr=0.0, decay=1.0, **SETTINGS)
    upload = Upload(torch.zeros(2, 64), 0.0, step, False, is_repeatable=True)
    with pytest.raises(ValueError, match="out must be bfloat16 or float16"):
        kernel.run(job_of(state, torch.zeros(2, dtype=torch.int64), [], upload))
