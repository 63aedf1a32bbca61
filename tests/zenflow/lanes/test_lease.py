"""Work waits for exactly those others that use the same memory against it."""

from hypothesis import given
from hypothesis import strategies as st

from zenflow.lanes.completion import Completion
from zenflow.lanes.lease import Lease, take

KINDS = ("reads", "fills", "changes")
NUM_LEASES = 3


class Content:
    """Who has used one content of the memory, which a `maker` may have made of the former one."""

    def __init__(self, maker=()):
        self.maker, self.writers, self.readers = list(maker), [], []

    @property
    def users(self):
        return [*self.maker, *self.writers, *self.readers]


class Memory:
    """Who has used one piece of memory, told from the definition: contents one after another."""

    def __init__(self):
        self.contents = [Content()]

    def before(self, kind):
        now, former = self.contents[-1], [w for c in self.contents[:-1] for w in c.users]
        if kind == "reads":
            return [*now.maker, *now.writers]
        return [*former, *now.maker] if kind == "fills" else [*former, *now.users]

    def enter(self, kind, work):
        if kind == "changes":
            self.contents.append(Content([work]))
        else:
            getattr(self.contents[-1], "readers" if kind == "reads" else "writers").append(work)


uses = st.dictionaries(st.integers(0, NUM_LEASES - 1), st.sampled_from(KINDS), max_size=3)
events = st.one_of(
    st.tuples(st.just("work"), uses),
    st.tuples(st.just("renew"), st.integers(0, NUM_LEASES - 1)),
    st.tuples(st.just("end"), st.integers(0, 30)),
)


def ended_before(work, waits):
    """Return all work that has ended when this one begins, by what each waited for."""
    found, left = set(), [work]
    while left:
        for earlier in waits[left.pop()]:
            if earlier not in found:
                found.add(earlier)
                left.append(earlier)
    return found


@given(st.lists(events, max_size=40))
def test_work_waits_for_all_that_it_must_and_for_nobody_else(history):
    leases, memories = [Lease() for _ in range(NUM_LEASES)], [Memory() for _ in range(NUM_LEASES)]
    works, waits, done = [], {}, set()
    for kind, what in history:
        if kind == "renew":
            leases[what].renew()
            memories[what].contents.append(Content())
        elif kind == "end" and works:
            work = works[what % len(works)]
            work.mark_done()
            done.add(work)
        elif kind == "work":
            work = Completion(f"work {len(works)}")
            chosen = {k: [leases[i] for i, own in what.items() if own == k] for k in KINDS}
            before = take(work, **chosen)
            must = [w for i, own in what.items() for w in memories[i].before(own)]
            assert len(before) == len(set(before))
            assert set(before) <= set(must) - done
            waits[work] = [*before, *done]
            assert set(must) <= ended_before(work, waits)
            for i, own in what.items():
                memories[i].enter(own, work)
            works.append(work)


def test_a_lease_over_the_same_bytes_goes_on_with_their_users():
    first, reader, second = map(Completion, ("a copy", "a reader", "another copy"))
    former = Lease()
    take(first, fills=[former])
    take(reader, reads=[former])
    assert take(second, fills=[Lease(former.users)]) == [first, reader]


def test_a_user_that_failed_stays():
    """So that its error reaches who needs the memory next."""
    failed, later = Completion("a copy"), Completion("a reader")
    lease = Lease()
    take(failed, fills=[lease])
    failed.fail(OSError("broken"))
    assert take(later, reads=[lease]) == [failed]
