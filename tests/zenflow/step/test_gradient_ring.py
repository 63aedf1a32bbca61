"""The ring holds each piece until it was sent, and never more than its memory."""

import contextlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import TINY, TinyStack, assert_equal, closing
from tests.zenflow.step import test_timing as timing
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device.cpu import CpuDevice
from zenflow.device.kernels.base import HostColumns
from zenflow.errors import DeadlineError, WorkerError
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import CopyLane
from zenflow.lanes.lease import take
from zenflow.rule import sizes
from zenflow.step.gradients.ring import GradientRing, PackJob
from zenflow.surface import assembly

DEVICE = CpuDevice(torch.device("cpu"))


class FakeBlock:
    """As much of a block as the ring looks at."""

    def __init__(self, num_rows, num_columns, columns):
        self.deferred = whole = HostColumns.of(columns, num_columns)

        def host_columns(low, high):
            indices, wide = whole.indices[low:high], (0, num_columns)
            return HostColumns(indices, whole.rows, low, high, *wide)

        self.split = SimpleNamespace(
            gradient_width=num_rows, slot_width=num_rows, host_columns=host_columns
        )
        self.gradient_shape = len(columns), num_rows


def make_jobs(shapes, seed=0, dtype=torch.bfloat16):
    """Return a job for each (O, I), some columns left out, with an empty host buffer."""
    generator = torch.Generator().manual_seed(seed)
    jobs = []
    for rows, columns in shapes:
        grad = torch.randn(rows, columns, generator=generator).to(dtype)
        chosen = torch.randperm(columns, generator=generator)[: max(1, columns * 3 // 4)].sort()
        host = torch.zeros(len(chosen.values), rows, dtype=dtype)
        jobs.append(PackJob.of(FakeBlock(rows, columns, chosen.values), grad, host))
    return jobs


def ring_for(jobs, monkeypatch=None, ring_bytes=None, wait_timeout=5.0):
    if ring_bytes is not None:
        monkeypatch.setattr(sizes, "RING_BYTES", ring_bytes)
    matrices = [(len(job.host), job.host[:1].nbytes) for job in jobs]
    return GradientRing(DEVICE, matrices, wait_timeout=wait_timeout)


def pack(ring, piece, sent, *waiting):
    """Pack a piece that one copy is going to read."""
    packed, slot = ring.pack(piece, *waiting)
    take(sent, reads=[slot])
    return packed


SHAPES = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, ring_bytes=st.integers(1, 100_000), late=st.integers(0, 3), steps=st.just(3))
def test_what_arrives_is_the_columns_however_late_copies_are(shapes, ring_bytes, late, steps):
    with pytest.MonkeyPatch.context() as patch:
        ring = ring_for(make_jobs(shapes), patch, ring_bytes)
    for step in range(steps):
        jobs, under_way = make_jobs(shapes, seed=step), []

        def finish_oldest(under_way=under_way):
            packed, sent = under_way.pop(0)
            DEVICE.transfer("d2h", packed, None)
            sent.mark_done()

        @contextlib.contextmanager
        def waiting(finish=finish_oldest, under_way=under_way):
            while under_way:  # the lane goes on while the ring is full
                finish()
            yield

        for piece in ring.pieces(jobs):
            sent = Completion("a copy")
            under_way.append((pack(ring, piece, sent, waiting), sent))
            if len(under_way) > late:
                finish_oldest()
        while under_way:
            finish_oldest()
        for job in jobs:
            assert torch.equal(job.host, job.grad.t()[job.columns.indices])


@given(shapes=SHAPES, ring_bytes=st.integers(1, 100_000))
def test_pieces_have_every_column_once_and_leave_room_for_others(shapes, ring_bytes):
    jobs = make_jobs(shapes)
    with pytest.MonkeyPatch.context() as patch:
        ring = ring_for(jobs, patch, ring_bytes)
    tallest = max(job.host[:1].nbytes for job in jobs)
    assert ring.num_bytes <= max(ring_bytes + 512, sizes.PIECES * (tallest + 512))
    for job in jobs:
        parts = [part for part in ring_jobs(ring, jobs) if part.block is job.block]
        assert torch.equal(
            torch.cat([part.columns.indices for part in parts]), job.columns.indices
        )
    for piece in ring.pieces(jobs):
        most = max(ring.num_bytes // sizes.PIECES, tallest)
        assert sum(job.num_bytes for job in piece) <= most


def ring_jobs(ring, jobs):
    return [job for piece in ring.pieces(jobs) for job in piece]


def test_a_full_ring_waits_for_the_oldest_copy_and_says_so_when_it_never_comes(monkeypatch):
    jobs = make_jobs([(64, 64)] * 8)
    ring = ring_for(jobs, monkeypatch, 16384, wait_timeout=0.05)
    waits = []

    @contextlib.contextmanager
    def waiting():
        waits.append(1)
        yield

    def fill():
        for piece in ring.pieces(jobs):
            pack(ring, piece, Completion("the gradients' copy"), waiting)

    with pytest.raises(DeadlineError, match="gradients' copy"):
        fill()
    assert waits == [1]


def test_every_step_finds_the_same_rooms_and_waits_for_who_still_reads_them(monkeypatch):
    jobs = make_jobs([(64, 64)] * 5)
    ring = ring_for(jobs, monkeypatch, 20000)  # three jobs fit
    unsent, readers, steps = [], {}, []

    @contextlib.contextmanager
    def waiting():
        unsent.pop(0).mark_done()
        yield

    for _ in range(3):
        steps.append([])
        for piece in ring.pieces(jobs):
            sent = Completion("a copy")
            unsent.append(sent)
            for room, _ in pack(ring, piece, sent, waiting):
                former = readers.get(room.data_ptr())
                assert former is None or former.is_done
                readers[room.data_ptr()] = sent
                steps[-1].append(room)
        ring.restart()
    for former, later in pairwise(steps):
        assert all(room is same for room, same in zip(later, former, strict=True))


def test_the_error_of_a_copy_reaches_who_needs_its_room(monkeypatch):
    jobs = make_jobs([(64, 64)] * 8)
    ring = ring_for(jobs, monkeypatch, 16384)

    def fill():
        for piece in ring.pieces(jobs):
            sent = Completion("the gradients' copy")
            pack(ring, piece, sent)
            sent.fail(ZeroDivisionError("a broken copy"))

    with pytest.raises(WorkerError, match="a broken copy"):
        fill()


class CpuWithRing(CpuDevice):
    """A CPU that packs and sends as a GPU does."""

    has_ring = True


@pytest.mark.parametrize(
    ("rule", "ring_bytes"),
    [
        pytest.param(rule, size, marks=[] if is_quick else pytest.mark.slow)
        for place, rule in enumerate(timing.RULES)
        for size, is_quick in ((1, place % 2 == 0), (2000, place % 2), (1 << 20, place % 4 == 0))
    ],
)
def test_a_run_through_the_ring_has_the_weights_of_one_without(monkeypatch, rule, ring_bytes):
    config, model = timing.config_of(rule), lambda: TinyStack(num_layers=8, width=12)
    expected = timing.train(model, config, "release", 12, host_threads=1)
    monkeypatch.setattr(assembly, "CpuDevice", CpuWithRing)
    monkeypatch.setattr(sizes, "RING_BYTES", ring_bytes)
    timing.delay(monkeypatch, CopyLane, "_perform", 1e-3, seed=1)
    actual = timing.train(model, config, "release", 12, host_threads=2)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True), start=1):
        assert_equal(ours, theirs, f"step {step}")


def test_keep_mode_has_no_ring(monkeypatch):
    monkeypatch.setattr(assembly, "CpuDevice", CpuWithRing)
    for mode, has_ring in (("keep", False), ("release", True)):
        model = TinyStack()
        with closing(
            ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**TINY), offload_gradients=mode)
        ) as optimizer:
            assert (optimizer._engine.ring is not None) == has_ring


def test_every_step_of_a_run_begins_at_the_rings_start(monkeypatch):
    monkeypatch.setattr(assembly, "CpuDevice", CpuWithRing)
    monkeypatch.setattr(sizes, "RING_BYTES", 2500)
    first, free_slot = [], GradientRing._free_slot

    def noted(ring, num_bytes, waiting):
        slot = free_slot(ring, num_bytes, waiting)
        first.append(slot)
        return slot

    monkeypatch.setattr(GradientRing, "_free_slot", noted)
    model, slots = TinyStack(num_layers=8, width=12), []
    settings = {"config": timing.config_of("S 3"), "offload_gradients": "release"}
    with closing(ZenFlowAdamW(model.parameters(), **settings)) as optimizer:
        for step in range(4):
            model.loss(step).backward()
            optimizer.step()
            slots.append(tuple(first))
            first.clear()
    assert len(slots[0]) > 1
    assert len(set(slots)) == 1
