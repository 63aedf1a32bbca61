"""The comparison of bits notices errors: one is put in at a time."""

import pytest

from tests.zenflow.races.checker import replaced
from tests.zenflow.streaming.training import Case, train
from zenflow import PacedLink
from zenflow.columns import handover
from zenflow.columns.layout import SplitParam
from zenflow.device.cpu import CpuDevice
from zenflow.errors import ZenFlowError
from zenflow.lanes.copies import CopyLane
from zenflow.rule import blocks
from zenflow.streaming.page import Page
from zenflow.streaming.stream import WeightStream
from zenflow.streaming.transfers import DOWN
from zenflow.surface.gradient_sums import GradientSums

PLAIN = Case(config={"topk_ratio": 0.2, "select_interval": 2}, recomputes="non-reentrant")
ACCUMULATED = Case(accumulation=2)
SLOW = PacedLink(1e9, 1e6)
"""A link over which landings are late."""


@pytest.fixture(autouse=True)
def memory_that_is_given_up_reads_nan(monkeypatch):
    """An error must not crash the tests: memory stays, and no number in it is of use."""

    def poison(self, memory, num_bytes, lane, after):
        if not num_bytes:
            memory.fill_(0xFF)

    monkeypatch.setattr(CpuDevice, "resize", poison)


def nothing(_):
    return lambda *args, **kwargs: None


def staying_where_they_are(_):
    def send_home(self, page):
        page.is_changed = False

    return send_home


def without_waiting(old):
    def submit(self, copy):
        if self.name == DOWN:
            copy.after = []
        old(self, copy)

    return submit


def forgetting_changes(old):
    def evict(self, page):
        page.is_changed = False
        old(self, page)

    return evict


def known_on_arrival(old):
    def bring(self, page):
        page.home_is_stale = False
        old(self, page)

    return bring


def always_in_a_graph(old):
    def show_at_home(self):
        self.in_graph = True
        old(self)

    return show_at_home


def across_pages(old):
    return lambda sizes, most, pages=None: old(sizes, most)


def the_nearest(_):
    """Give up the page of the layer at work, or another near one."""

    def make_space(self, wanted):
        while len(self._here) >= self.slots:
            near = min(self._here, key=lambda page: abs(page.index - wanted.index))
            self.evict(near)

    return make_space


def losing(old):
    def restore(self, split):
        old(self, split)
        split.param.grad = None

    return restore


MUTANTS = {
    "weights do not go home": (WeightStream, "send_home", staying_where_they_are, PLAIN),
    "weights go home before updates land": (CopyLane, "submit", without_waiting, PLAIN),
    "changes are given up": (WeightStream, "evict", forgetting_changes, PLAIN),
    "important columns are not written": (SplitParam, "write_important", nothing, PLAIN),
    "stale homes are not known": (WeightStream, "_bring", known_on_arrival, PLAIN),
    "owners change before weights are up to date": (handover, "write_newer", nothing, PLAIN),
    "weights at home read NaN": (Page, "show_at_home", always_in_a_graph, PLAIN),
    "a page in use is given up": (
        WeightStream,
        "_make_space",
        the_nearest,
        PLAIN,
    ),
    "buckets reach across pages": (blocks, "filled_in_order", across_pages, PLAIN),
    "sums stay at home": (GradientSums, "restore", nothing, ACCUMULATED),
    "sums are lost on their way": (GradientSums, "restore", losing, ACCUMULATED),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_error_is_noticed(name):
    owner, attribute, make, case = MUTANTS[name]
    plain = train(case)
    link = SLOW if owner is CopyLane else None
    with replaced(owner, attribute, make(vars(owner)[attribute])):
        try:
            found = train(case, {"slots": 2}, link=link).differs_from(plain)
        except (AssertionError, RuntimeError, TypeError, ZenFlowError) as error:
            found = [str(error)]
    assert found
