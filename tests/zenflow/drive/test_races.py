"""States on a drive: no access without an order, and every order that is taken out is missed."""

import contextlib

import pytest

from tests.zenflow.races.checker import replaced
from tests.zenflow.races.harness import races
from tests.zenflow.races.test_mutants import Mutant, after_some
from tests.zenflow.races.test_races import drop, look, save_and_load
from tests.zenflow.races.test_streaming import streamed_races
from zenflow.drive import lane
from zenflow.drive.lane import DriveLane
from zenflow.drive.loan import Loan
from zenflow.lanes.host_worker import HostWorker

BASE = {"topk_ratio": 0.0, "update_interval": 2}


@pytest.mark.parametrize(
    "changes",
    [
        BASE,
        {**BASE, "update_interval": 4, "queue_depth": 2},
        {**BASE, "host_state": "compact"},
        {**BASE, "overlap_step": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_buffers", [1, 12])
def test_a_rule(changes, num_buffers, state_dir, monkeypatch):
    monkeypatch.setattr(lane, "NUM_BUFFERS", num_buffers)
    assert races("release", changes, steps=6, state_dir=state_dir) == []


@pytest.mark.parametrize("then", [look, drop, save_and_load])
def test_what_happens_between_steps(then, state_dir):
    assert races("keep", BASE, steps=6, then=then, state_dir=state_dir) == []


def test_streamed_weights(state_dir):
    assert streamed_races(BASE, steps=6, then=look, state_dir=state_dir) == []


def freed_before_its_write(old):
    def take_back(self, loan, *, changed):
        memory = loan.memory
        old(self, loan, changed=changed)
        if changed and memory is not None:
            with self._condition:
                self._free.append(memory)
                self._condition.notify_all()

    return take_back


def given_back_early(old):
    """Let an extent go to the writer when its user begins to change it."""

    @contextlib.contextmanager
    def used(self, *, changes):
        if not changes:
            with old(self, changes=False) as state:
                yield state
            return
        state = self.state
        self.give_back(changed=True)
        yield state

    return used


MUTANTS = {
    "a buffer is free before it is written": Mutant(
        DriveLane, "_take_back", freed_before_its_write
    ),
    "an extent is written while it is changed": Mutant(Loan, "used", given_back_early),
    "tasks do not wait for gradients": Mutant(
        HostWorker, "submit", after_some(lambda what: "copy" not in what and "d2h" not in what)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_order_is_found(name, state_dir):
    mutant = MUTANTS[name]
    old = vars(mutant.owner)[mutant.name]
    with replaced(mutant.owner, mutant.name, mutant.make(old)):
        assert races("release", BASE, steps=8, first=True, state_dir=state_dir)
