"""A pool's threads do what the kernel's functions do, bit for bit, however rows are shared out."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zenflow.columns.host_rows import HostRows
from zenflow.columns.host_update import Accumulation, Moments, Update, WindowUpdate
from zenflow.host import kernel
from zenflow.host import pool as host_pool
from zenflow.host.library import c_library
from zenflow.host.pool import HostPool
from zenflow.rule.adamw import Hyper, host_row_scales

pytestmark = pytest.mark.skipif(
    kernel.active_kernel() != "c", reason="needs the compiled host kernel"
)

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_state(rows, cols, dtype, seed, *, most_steps=3):
    """Return a block's tensors with rows of different ages, some of them inactive."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, cols, generator=generator)

    return {
        "master": normal(),
        "exp_avg": normal() * 0.1,
        "exp_avg_sq": normal().square() * 0.1,
        "step": torch.randint(0, most_steps + 1, (rows,), generator=generator),
        "grad": normal().to(dtype),
        "acc": normal(),
        "out": torch.zeros(rows, cols, dtype=dtype),
        "active": torch.randint(0, 2, (rows,), generator=generator, dtype=torch.uint8),
    }


def expected_of(kind, state, factor):
    """Do with the kernel's own functions what the pool is asked for."""
    want = {name: value.clone() for name, value in state.items()}
    if kind == "accumulate":
        kernel.accumulate(want["acc"], want["grad"], factor, first=False)
    elif kind == "moments":
        want["step"] += 1
        kernel.moments(
            want["exp_avg"], want["exp_avg_sq"], want["grad"], factor, beta1=0.9, beta2=0.98
        )
    else:
        want["step"] += want["active"]
        step_size, denom_scale = host_row_scales(want["step"].numpy(), HYPER, 2.0)
        kernel.adamw(
            want["master"], want["exp_avg"], want["exp_avg_sq"], want["out"],
            grad=want["grad"], grad_scale=factor, acc=want["acc"], count=3, step_size=step_size,
            denom_scale=denom_scale, active=want["active"], beta1=0.9, beta2=0.98, eps=1e-8,
            decay=1.0 - HYPER.lr * 2.0 * HYPER.weight_decay, prediction=1.5,
        )  # fmt: skip
    return want


def rows_of(state):
    return HostRows(
        **{name: state[name] for name in ("master", "exp_avg", "exp_avg_sq", "step")},
        accumulators=[state["acc"]],
        staging=state["grad"],
    )


def job_of(kind, state):
    host, shape = rows_of(state), tuple(state["master"].shape)
    if kind == "accumulate":
        return Accumulation(host, shape, accumulator=0, first=False).encode()
    if kind == "moments":
        return Moments(host, shape, HYPER).encode()
    window = WindowUpdate(
        hyper=HYPER, lr_scale=2.0, count=3, accumulator=0, reads_staging=True, prediction=1.5
    )
    return Update(host, shape, window, state["active"], state["out"]).encode()


def assert_same(state, want):
    for name, value in want.items():
        assert torch.equal(state[name], value), name


KINDS = ["accumulate", "moments", "adamw"]


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
    states = [make_state(rows, cols, dtype, seed) for seed in range(len(kinds))]
    wants = [expected_of(kind, state, 0.25) for kind, state in zip(kinds, states, strict=True)]
    pool = HostPool.open(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "PIECE_ELEMENTS", piece)
        pool.run([job_of(*pair) for pair in zip(kinds, states, strict=True)], 0.25)
    pool.close()
    for state, want in zip(states, wants, strict=True):
        assert_same(state, want)


def test_bias_corrections_of_a_long_run_are_those_of_pythons_floats():
    state = make_state(600, 3, torch.float32, seed=1, most_steps=2**24 + 5)
    want = expected_of("adamw", state, 1.0)
    pool = HostPool.open(2)
    pool.run([job_of("adamw", state)], 1.0)
    pool.close()
    assert_same(state, want)


def test_callers_share_the_threads_and_each_returns_when_its_own_rows_are_done(monkeypatch):
    monkeypatch.setattr(host_pool, "PIECE_ELEMENTS", 64)
    pool, wrong = HostPool.open(3), []

    def call(seed):
        for turn in range(40):
            state = make_state(50, 17, torch.bfloat16, seed=1000 * seed + turn)
            kind = KINDS[turn % 3]
            want = expected_of(kind, state, 0.5)
            pool.run([job_of(kind, state)], 0.5)
            wrong.extend(name for name in want if not torch.equal(state[name], want[name]))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    pool.close()
    assert not wrong


def test_a_call_without_rows_returns_and_one_after_it_is_served():
    pool, state = HostPool.open(2), make_state(9, 5, torch.float32, seed=3)
    pool.run([], 1.0)
    pool.run([job_of(kind, make_state(0, 5, torch.float32, seed=3)) for kind in KINDS], 1.0)
    want = expected_of("moments", state, 1.0)
    pool.run([job_of("moments", state)], 1.0)
    assert_same(state, want)
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
        acc = torch.zeros(rows, cols)
        host = HostRows(acc, acc, acc, acc, accumulators=[acc], staging=torch.ones(rows, cols))
        pool.run([Accumulation(host, (rows, cols), accumulator=0, first=True).encode()], 1.0)
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
