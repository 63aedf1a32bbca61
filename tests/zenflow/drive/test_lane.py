"""The lane: traffic to the byte, the most urgent first, no read before its extent's write."""

import random
import threading
import time
from fractions import Fraction

import pytest
import torch

from tests.models import TINY, TinyStack, closing
from tests.zenflow.runs import make, take_steps
from zenflow import ZenFlowConfig
from zenflow.drive import disk, lane
from zenflow.drive.extents import cut
from zenflow.drive.folder import StateFolder
from zenflow.drive.lane import DriveLane
from zenflow.host.compact import CompactState
from zenflow.host.float_state import FloatState
from zenflow.lanes.completion import wait_all
from zenflow.rule.sizes import SECTOR


@pytest.fixture
def drive(state_dir):
    """Return a running lane of twelve extents."""
    extents = [r for each in cut([(0, 60, 12)], FloatState) for r in each]
    assert len(extents) == 12
    made = DriveLane(StateFolder(state_dir, {}, extents), extents, wait_timeout=20)
    made.start()
    with closing(made):
        yield made


def begin(state_dir, *, width=24, **config):
    settings = ZenFlowConfig(**{"topk_ratio": 0, "block_elements": 300, **TINY, **config})
    model = TinyStack(num_layers=4, width=width)
    return make("release", settings, model, state_dir=state_dir, host_threads=1)


# ---- traffic ------------------------------------------------------------------------------------


def settle(optimizer):
    """Let all queued work end, without a flush of what waits; return the bytes so far."""
    engine = optimizer._engine
    wait_all(engine.schedule.tasks.users_of(engine.layout.blocks), 20)
    engine.drive.flush()
    return engine.drive.folder.read_bytes, engine.drive.folder.written_bytes


@pytest.mark.parametrize("host_state", ["float32", "compact"])
@pytest.mark.parametrize(("interval", "depth"), [(1, 1), (4, 1), (4, 2), (4, 4), (6, 4)])
def test_a_step_moves_s_over_q_bytes_each_way(interval, depth, host_state, state_dir):
    model, optimizer = begin(
        state_dir, update_interval=interval, queue_depth=depth, host_state=host_state
    )
    with closing(optimizer):
        take_steps(model, optimizer, range(2 * interval))
        before = settle(optimizer)
        take_steps(model, optimizer, range(3 * interval))
        moved = [now - then for now, then in zip(settle(optimizer), before, strict=True)]
        states = sum(extent.num_bytes for extent in optimizer._engine.drive.extents)
        passes = 3 * -(-interval // depth)  # S / q in a window, where q divides S
        assert moved == [passes * states] * 2


def test_extents_have_no_more_than_their_states_and_a_sector(monkeypatch):
    monkeypatch.setattr("zenflow.drive.extents.EXTENT_ELEMENTS", 256)
    for kind, num_bytes in ((FloatState, 12), (CompactState, Fraction(5 * 64 + 2, 64))):
        ((extent,),) = cut([(0, 4, 64)], kind)
        lines = len(kind.DTYPES) * 64
        assert 0 <= extent.num_bytes - num_bytes * 256 < SECTOR + lines


def test_reports_count_the_traffic_and_timelines_show_it(state_dir):
    config = ZenFlowConfig(topk_ratio=0, update_interval=2, **TINY)
    model = TinyStack(num_layers=4, width=24)
    _, optimizer = make(
        "release", config, model, state_dir=state_dir, host_threads=1, timeline_steps=50
    )
    with closing(optimizer):
        first = optimizer._engine.drive.take_bytes()
        reports = []
        for step in range(9):
            take_steps(model, optimizer, [step])
            reports.append(optimizer.report)
        settle(optimizer)
        rest = optimizer._engine.drive.take_bytes()
        folder = optimizer._engine.drive.folder
        for index, name in enumerate(("read", "written")):
            of_steps = sum(getattr(report, f"drive_{name}_bytes") for report in reports)
            everything = getattr(folder, f"{name}_bytes")
            assert first[index] + of_steps + rest[index] == everything
        spans = [span for span in optimizer.timeline.spans if span.lane == "drive"]
        assert {span.name for span in spans} == {"read", "write"}
        read = sum(span.num_bytes for span in spans if span.name == "read")
        assert read == folder.read_bytes


def test_true_weights_read_the_masters_alone(state_dir, monkeypatch):
    monkeypatch.setattr("zenflow.drive.extents.EXTENT_ELEMENTS", 1100)
    model, optimizer = begin(state_dir, width=48, update_interval=2, block_elements=2400)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        optimizer.synchronize()
        before = settle(optimizer)
        with optimizer.true_weights():
            after = settle(optimizer)
        read, written = after[0] - before[0], after[1] - before[1]
        extents = optimizer._engine.drive.extents
        weights = sum(extent.weight_bytes for extent in extents)
        assert weights < 0.6 * sum(extent.num_bytes for extent in extents)
        assert (read, written) == (weights, 0)


def test_a_checkpoint_copies_no_state(state_dir):
    model, optimizer = begin(state_dir, update_interval=2)
    with closing(optimizer):
        take_steps(model, optimizer, range(5))
        optimizer.synchronize()
        before = settle(optimizer)
        optimizer.state_dict()
        assert settle(optimizer) == before


def test_a_step_that_waits_for_the_drive_says_so(state_dir, monkeypatch):
    """The drive is to blame while the host has nothing to work on, and no longer."""
    model, optimizer = begin(state_dir, update_interval=1)
    read = disk.read

    def slow(*args):
        time.sleep(0.01)
        read(*args)

    with closing(optimizer):
        take_steps(model, optimizer, range(3))
        before = optimizer.report.stalls.get("drive", 0.0)
        monkeypatch.setattr(disk, "read", slow)
        take_steps(model, optimizer, range(3, 6))
        stalls = optimizer.report.stalls
        assert stalls["drive"] > max(before + 0.05, stalls.get("host", 0.0))


def test_states_are_written_once_before_the_first_step(state_dir):
    """A trainer loads a new optimizer's own state, and nothing is written for that."""
    model, optimizer = begin(state_dir)
    with closing(optimizer):
        states = sum(extent.num_bytes for extent in optimizer._engine.drive.extents)
        optimizer.load_state_dict(optimizer.state_dict())
        assert settle(optimizer) == (0, states)
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2.0)
        optimizer.load_state_dict(optimizer.state_dict())  # which is of other weights now
        assert settle(optimizer)[1] > states


# ---- order --------------------------------------------------------------------------------------


def fill(drive):
    for extent, state in drive.passing(drive.extents, changes=True):
        state.master.fill_(float(extent.index))


def test_extents_come_back_as_they_were_changed(drive):
    fill(drive)
    for changes in (True, False):
        for extent, state in drive.passing(drive.extents, changes=changes):
            assert (state.master == extent.index).all()
            assert not state.exp_avg.any()


def test_the_most_urgent_extents_are_read_first(drive, monkeypatch):
    fill(drive)
    drive.flush()
    read, order = disk.read, []
    begun, gate = threading.Semaphore(0), threading.Semaphore(0)

    def noted(file, memory, offset):
        order.append(offset)
        begun.release()
        gate.acquire(timeout=20)
        read(file, memory, offset)

    monkeypatch.setattr(disk, "read", noted)
    urgency = list(range(12))
    random.Random(0).shuffle(urgency)
    loans = [
        drive.loan(extent, (7, place), 1)
        for extent, place in zip(drive.extents, urgency, strict=True)
    ]
    early = [drive.loan(drive.extents[0], (9,), 1) for _ in range(lane.READERS)]
    for loan in early:
        loan.ask()
        begun.acquire(timeout=20)
    for loan in loans:  # while all readers are busy
        loan.ask()
    for _ in (*early, *loans):
        gate.release()
    for loan in (*early, *sorted(loans, key=lambda loan: loan.urgency)):
        loan.there.wait_done(20)
        loan.give_back(changed=False)
    wanted = [loan.extent.place(0) for loan in sorted(loans, key=lambda loan: loan.urgency)]
    found = order[lane.READERS :]
    assert all(abs(found.index(place) - rank) < lane.READERS for rank, place in enumerate(wanted))


def test_an_extent_is_not_read_before_it_is_written(drive, monkeypatch):
    fill(drive)
    drive.flush()
    written, write = threading.Event(), disk.write

    def late(*args):
        written.wait(20)
        write(*args)

    monkeypatch.setattr(disk, "write", late)
    extent = drive.extents[3]
    for value in (40.0, 41.0):
        loan = drive.loan(extent, (0,), 1)
        loan.ask()
        if value == 41.0:
            time.sleep(0.05)
            assert not loan.there.is_done
            written.set()
        loan.there.wait_done(20)
        assert (loan.state.master == (3.0 if value == 40.0 else 40.0)).all()
        loan.state.master.fill_(value)
        loan.give_back(changed=True)
    ((_, state),) = drive.passing([extent])
    assert (state.master == 41.0).all()


def test_a_loan_whose_user_fails_changes_nothing(drive):
    fill(drive)

    def fails():
        for _, state in drive.passing(drive.extents, changes=True):
            state.master.fill_(-1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    for _ in range(3):  # and all buffers have come back
        for extent, state in drive.passing(drive.extents):
            assert (state.master == extent.index).all()
