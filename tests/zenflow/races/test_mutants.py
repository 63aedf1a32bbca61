"""The checker finds every synchronisation that is missing: one is taken out at a time."""

import io
from dataclasses import dataclass, field

import pytest
import torch

from tests.zenflow.races.checker import replaced
from tests.zenflow.races.harness import any_races, races
from tests.zenflow.races.runtime import CheckedRuntime
from tests.zenflow.races.test_races import KNOBS, drop, look, save_and_load
from zenflow.columns import handover
from zenflow.columns.gradient_queue import RoomPool
from zenflow.columns.upload_pool import UploadBuffer, UploadPool
from zenflow.device.base import HostValues
from zenflow.device.cuda import CudaDevice
from zenflow.lanes.copies import CopyLane
from zenflow.lanes.host_worker import HostWorker
from zenflow.lanes.lease import Lease
from zenflow.rule import sizes
from zenflow.step.engine import Engine
from zenflow.step.gradients.ring import GradientRing
from zenflow.step.host import schedule as host_schedule
from zenflow.step.uploads import UploadGate
from zenflow.surface import gradient_hooks


class NoOrder:
    """An event that says nothing."""

    def __init__(self):
        self.clock = {}


def nothing(_):
    return lambda self, *args, **kwargs: None


def at_once(old):
    return lambda self, jobs, after, *rest: old(self, jobs, NoOrder(), *rest)


def sent_at_once(old):
    return lambda self, lane, jobs, after: old(self, lane, jobs, NoOrder())


def needing_nothing(lane):
    def make(old):
        def submit(self, copy):
            if self.name == lane:
                copy.after = []
            old(self, copy)

        return submit

    return make


def after_some(keeps):
    """Let host tasks wait for some completions only, chosen by their names."""

    def make(old):
        def submit(self, *args, after, **kwargs):
            return old(self, *args, after=[c for c in after if keeps(c.what)], **kwargs)

        return submit

    return make


def seen_early(_):
    return lambda self, launched: launched.mark_done()


def read_early(old):
    return lambda self, values, wait=None: old(self, values)


def room_at_once(_):
    def make_room(self, num_bytes, waiting):
        self._taken.clear()
        return self._next if self._next + num_bytes <= self.num_bytes else 0

    return make_room


def forgetting_uploads(old):
    def restart(self):
        old(self)
        self._before = []

    return restart


def unpinned_at_once(_):
    return lambda self, buffer: self._device.free_slab(buffer.memory.data)


def put_early(old):
    def put(self):
        self.steps._wait = self.numbers._wait = None
        old(self)

    return put


def never_busy(old):
    def give(self, room):
        room.lease = Lease()
        old(self, room)

    return give


def forgetting_users(_):
    def renew(self):
        self._before, self._writers, self._readers = [], [], []

    return renew


def kept_for_the_first(old):
    """Let only the slot's first reader hold it."""

    def pack(self, piece, *waiting):
        packed, slot = old(self, piece, *waiting)
        slot._readers = OnlyOne()
        return packed, slot

    return pack


class OnlyOne(list):
    """A list that drops all but the last that came."""

    def append(self, item):
        self[:] = [item]


def without_copies(_):
    def drain(self):
        blocks = self.layout.blocks
        self.schedule.tasks.flush(blocks)
        tasks = self.schedule.tasks
        rows = [user for lease in tasks.rows for user in lease.users]
        host_schedule.wait_all(rows, self.options.wait_timeout)
        self.device.synchronize()

    return drain


def load_at_once(training, step):
    """Go back to an earlier state without waiting for what is under way."""
    if step == 3:
        training.saved = io.BytesIO()
        torch.save(training.optimizer.state_dict(), training.saved)
    if step == 5:
        training.saved.seek(0)
        state = torch.load(training.saved, weights_only=False)
        with replaced(Engine, "drain", nothing(None)):
            training.optimizer.load_state_dict(state)


def drop_and_look(training, step):
    drop(training, step)
    look(training, step - 1)


@dataclass(frozen=True)
class Mutant:
    """A synchronisation that is taken out, and a training in which it is missed."""

    owner: object
    name: str
    make: object
    mode: str = "release"
    changes: dict = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    ring_bytes: int | None = None


SELECTING = {"update_interval": 3, "select_interval": 1}
MUTANTS = {
    "gradients are packed at once": Mutant(CudaDevice, "pack", at_once, "keep"),
    "the ring is sent at once": Mutant(CudaDevice, "transfer", sent_at_once),
    "uploads do not wait for backward": Mutant(CudaDevice, "unpack", at_once),
    "compute does not wait for uploads": Mutant(CudaDevice, "order_after", nothing),
    "nothing at a landing is waited for": Mutant(UploadGate, "wait", nothing),
    "the allocator is told of no stream": Mutant(CheckedRuntime, "keep", nothing, "keep"),
    "gradients overwrite what is read": Mutant(
        CopyLane, "submit", needing_nothing("d2h"), "keep"
    ),
    "uploads do not wait for the update": Mutant(CopyLane, "submit", needing_nothing("h2d")),
    "copies are seen to end early": Mutant(CopyLane, "_watch", seen_early),
    "host tasks wait for nothing": Mutant(HostWorker, "submit", after_some(lambda _: False)),
    "host tasks wait for no copy to the host": Mutant(
        HostWorker, "submit", after_some(lambda what: "d2h" not in what)
    ),
    "host tasks wait for no upload": Mutant(
        HostWorker, "submit", after_some(lambda what: "h2d" not in what)
    ),
    "norms are read early": Mutant(HostValues, "__init__", read_early),
    "columns enter the host early": Mutant(
        handover._Entering, "put", put_early, changes=SELECTING
    ),
    "the ring is written at once": Mutant(GradientRing, "_free_slot", room_at_once, ring_bytes=1),
    "the ring keeps nothing for uploads": Mutant(
        GradientRing, "pack", kept_for_the_first, ring_bytes=1
    ),
    "upload buffers are written at once": Mutant(UploadBuffer, "restart", forgetting_uploads),
    "rooms of the queue are free at once": Mutant(
        RoomPool, "give", never_busy, changes={"update_interval": 4}
    ),
    "staging is free at once": Mutant(
        Lease, "renew", forgetting_users, changes={"queue_depth": 1}
    ),
    "true weights are shown at once": Mutant(
        Engine, "drain", nothing, training={"then": look}
    ),
    "draining forgets the copies": Mutant(
        Engine, "drain", without_copies, training={"then": drop_and_look}
    ),
    "gradients in a larger memory are not copied": Mutant(
        gradient_hooks, "is_own", lambda _: lambda param, is_sharded: True, "keep",
        training={"views": True},
    ),
    "gradients that the program has a name for are not copied": Mutant(
        gradient_hooks, "is_own", lambda _: lambda param, is_sharded: True, "keep",
        training={"rewrites": True},
    ),
    "a state is saved and loaded at once": Mutant(
        Engine, "drain", nothing, training={"then": save_and_load}
    ),
    "a state is loaded at once": Mutant(
        Engine, "drain", lambda old: old, training={"then": load_at_once}
    ),
    "upload buffers are unpinned at once": Mutant(
        UploadPool, "_free", unpinned_at_once, training={"log": KNOBS}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_synchronisation_is_found(name, monkeypatch):
    mutant = MUTANTS[name]
    if mutant.ring_bytes is not None:
        monkeypatch.setattr(sizes, "RING_BYTES", mutant.ring_bytes)
    old = vars(mutant.owner)[mutant.name]
    changes = {"update_interval": 2, **mutant.changes}
    with replaced(mutant.owner, mutant.name, mutant.make(old)):
        assert any_races(
            lambda: races(mutant.mode, changes, steps=8, first=True, **mutant.training)
        )


def test_a_selection_that_waits_for_no_copy_is_found(monkeypatch):
    monkeypatch.setattr(host_schedule, "wait_all", lambda completions, timeout: None)
    assert any_races(lambda: races("release", SELECTING, steps=8, first=True))
