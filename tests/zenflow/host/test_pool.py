"""A pool's threads do what the kernel's functions do, bit for bit, however rows are shared out."""

import ctypes
import ctypes.util
import platform
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zenflow.host import kernel, torch_kernel
from zenflow.host import pool as host_pool
from zenflow.host.jobs import AdamStep, CatchUpJob, SumJob, Upload
from zenflow.host.library import c_library
from zenflow.host.pool import HostPool

pytestmark = pytest.mark.skipif(
    kernel.active_kernel() != "c", reason="needs the compiled host kernel"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["sum", "catch_up", "upload"]


def job_of(kind, rows, cols, dtype, seed, *, most_steps=3):
    """Return a job on rows of different ages, some of them inactive; the same for one seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, cols, generator=generator)

    if kind == "sum":
        return SumJob(normal(), normal().to(dtype), 0.25, is_first=False)
    count = torch.randint(0, most_steps + 1, (rows,), generator=generator)
    active = torch.randint(0, 2, (rows,), generator=generator, dtype=torch.uint8)
    steps = [
        AdamStep(3e-3, 0.9, 0.98, 1e-8, 1.0 - 3e-4, 0.5 * index, normal().to(dtype))
        for index in range(3 if kind == "catch_up" else 0)
    ]
    upload = Upload(
        torch.zeros(rows, cols, dtype=dtype), 1.5,
        AdamStep(3e-3, 0.9, 0.98, 1e-8, 1.0), repeats_last=False,
    )  # fmt: skip
    state = (normal(), normal() * 0.1, normal().square() * 0.1)
    return CatchUpJob(*state, count, active, steps, upload)


def tensors_of(job):
    if isinstance(job, SumJob):
        return [job.total]
    return [job.master, job.exp_avg, job.exp_avg_sq, job.step, job.upload.out]


def assert_done(job, *arguments, **settings):
    """Compare a job that was done with what the kernel does on one thread."""
    want = job_of(*arguments, **settings)
    kernel.run(want)
    for ours, theirs in zip(tensors_of(job), tensors_of(want), strict=True):
        assert torch.equal(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    rows=st.integers(0, 700),
    cols=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    piece=st.integers(1, 3000),
    threads=st.integers(0, 3),
)
def test_any_cut_on_any_threads_gives_the_kernels_bits(kinds, rows, cols, dtype, piece, threads):
    cases = [(kind, rows, cols, dtype, seed) for seed, kind in enumerate(kinds)]
    jobs = [job_of(*case) for case in cases]
    pool = HostPool.open(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "PIECE_ELEMENTS", piece)
        pool.run([job.encode() for job in jobs])
    pool.close()
    for job, case in zip(jobs, cases, strict=True):
        assert_done(job, *case)


UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())
"""C's FE_UPWARD: the mode in which a thread rounds sums up."""


@pytest.mark.skipif(UPWARD is None, reason="the processor's rounding modes are not known here")
def test_helpers_do_rows_of_a_large_call():
    """Whose rows are whose is seen by their rounding: this thread alone rounds up."""
    maths, pool = ctypes.CDLL(ctypes.util.find_library("m")), HostPool.open(1)
    totals = torch.ones(64, host_pool.PIECE_ELEMENTS)
    job = SumJob(totals, torch.full_like(totals, 2.0**-30), 1.0, is_first=False)
    deadline, helped = time.monotonic() + 20, 0
    while helped == 0 and time.monotonic() < deadline:  # a busy machine may start none in time
        totals.fill_(1.0)
        maths.fesetround(UPWARD)
        try:
            pool.run([job.encode()])
        finally:
            maths.fesetround(0)
        helped = int((totals == 1.0).all(dim=1).sum())
    pool.close()
    assert 0 < helped < len(totals)


def test_bias_corrections_of_a_long_run_are_those_of_pythons_floats(monkeypatch):
    case, most_steps = ("catch_up", 600, 3, torch.float32, 1), 2**24 + 5
    job = job_of(*case, most_steps=most_steps)
    pool = HostPool.open(2)
    pool.run([job.encode()])
    pool.close()
    want = job_of(*case, most_steps=most_steps)
    torch_kernel.run(want)
    for ours, theirs in zip(tensors_of(job), tensors_of(want), strict=True):
        assert torch.equal(ours, theirs)


def test_callers_share_the_threads_and_each_returns_when_its_own_rows_are_done(monkeypatch):
    monkeypatch.setattr(host_pool, "PIECE_ELEMENTS", 64)
    pool, wrong = HostPool.open(3), []

    def call(seed):
        for turn in range(40):
            case = (KINDS[turn % 3], 50, 17, torch.bfloat16, 1000 * seed + turn)
            job, want = job_of(*case), job_of(*case)
            pool.run([job.encode()])
            kernel.run(want)
            pairs = zip(tensors_of(job), tensors_of(want), strict=True)
            wrong.extend(case for ours, theirs in pairs if not torch.equal(ours, theirs))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    pool.close()
    assert not wrong


def test_a_call_without_rows_returns_and_one_after_it_is_served():
    pool, case = HostPool.open(2), ("catch_up", 9, 5, torch.float32, 3)
    pool.run([])
    empty = [job_of(kind, 0, 5, torch.float32, 3) for kind in KINDS]
    pool.run([job.encode() for job in empty])
    job = job_of(*case)
    pool.run([job.encode()])
    assert_done(job, *case)
    pool.close()
    pool.close()  # closing twice is fine


def test_threads_that_the_system_does_not_give_are_an_error(monkeypatch):
    library = c_library()
    with monkeypatch.context() as patch:
        patch.setattr(library, "zenflow_pool_open", lambda _: None)
        with pytest.raises(RuntimeError, match="host_threads"):
            HostPool(library, 2)


def test_a_call_returns_only_when_its_last_piece_is_done(monkeypatch):
    """Pieces of a few milliseconds, while the ends of small calls wake whoever waits."""
    rows, cols = 2, 1 << 21
    monkeypatch.setattr(host_pool, "PIECE_ELEMENTS", cols)
    pool, over = HostPool.open(rows), threading.Event()

    def sum_of(rows, cols):
        acc, grad = torch.zeros(rows, cols), torch.ones(rows, cols)
        pool.run([SumJob(acc, grad, 1.0, is_first=True).encode()])
        return acc[:, -1].tolist()

    def call_again_and_again():
        while not over.is_set():
            sum_of(1, 8)

    other = threading.Thread(target=call_again_and_again)
    other.start()
    ends = [sum_of(rows, cols) for _ in range(5)]
    over.set()
    other.join(20)
    pool.close()
    assert ends == [[1.0] * rows] * 5
