"""What carries clocks among host threads, and where memory is the device's.

Only what the engine rests on counts: completions, copies and tasks that are handed over. A lock
that two threads happen to take one after the other orders nothing.
"""

import contextlib
import threading

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.zenflow.races.checker import replaced
from tests.zenflow.races.clocks import LOCK, join, knows
from zenflow.device.kernels.choice import reason_against_triton
from zenflow.drive import lane
from zenflow.drive.lane import DriveLane
from zenflow.host.jobs import CatchUpJob, CompactJob, SumJob
from zenflow.lanes import copies, host_worker
from zenflow.lanes.completion import Completion
from zenflow.lanes.copies import CopyLane
from zenflow.lanes.host_worker import HostWorker


class _Notes:
    """Clocks by completion. They are kept: a new one may get the place of one that is gone."""

    def __init__(self):
        self._clocks = {}

    def of(self, thing):
        return self._clocks.setdefault(id(thing), ({}, thing))[0]


@contextlib.contextmanager
def edges(checker):
    """Let completions, copies, tasks and host jobs tell the checker."""
    with contextlib.ExitStack() as stack:
        kinds = (_completions, _copies, _tasks, _loans, _threads, _jobs, _kernels, _kinds)
        for patches in kinds:
            for owner, name, make in patches(checker):
                old = vars(owner).get(name) or getattr(owner, name)
                stack.enter_context(replaced(owner, name, make(old)))
        yield


def _completions(checker):
    launched, done = _Notes(), _Notes()

    def tells(notes):
        def make(old):
            def mark(self, *args):
                with LOCK:
                    for note in notes:
                        join(note.of(self), checker.thread.clock)
                return old(self, *args)

            return mark

        return make

    def learns(notes):
        def make(old):
            def wait(self, timeout):
                old(self, timeout)
                with LOCK:
                    checker.thread.learn(notes.of(self))

            return wait

        return make

    asking = threading.local()

    def is_done(old):
        def read(self):
            """Tell who happens to look nothing new: the end may always be seen later."""
            with LOCK:
                ended = old.__get__(self)
                clock = done.of(self)
                if ended and getattr(asking, "whole", False):
                    checker.thread.learn(clock)
                return ended and knows(checker.thread.clock, clock)

        return property(read, old.__set__)

    def has_succeeded(old):
        return property(lambda self: self.is_done and self.error is None, old.__set__)

    def when_done(old):
        def follow(self, follower):
            """Let the follower know the end, but not the thread that happened to call it."""
            before, asking.whole = checker.thread.told(), True
            try:
                old(self, follower)
            finally:
                checker.thread.clock, asking.whole = before, False

        return follow

    return [
        (Completion, "mark_launched", tells([launched])),
        (Completion, "mark_done", tells([launched, done])),
        (Completion, "wait_launched", learns(launched)),
        (Completion, "wait_done", learns(done)),
        (Completion, "is_done", is_done),
        (Completion, "has_succeeded", has_succeeded),
        (Completion, "when_done", when_done),
    ]


def _copies(checker):
    queued = _Notes()

    def submit(old):
        def tell(self, copy):
            with LOCK:
                join(queued.of(copy.completion), checker.thread.clock)
            old(self, copy)

        return tell

    def perform(old):
        def learn(self, copy):
            with LOCK:
                checker.thread.learn(queued.of(copy.completion))
            old(self, copy)

        return learn

    return [(CopyLane, "submit", submit), (CopyLane, "_perform", perform)]


def _tasks(checker):
    ready = _Notes()

    def arrived(old):
        def tell(self, task, completion):
            with LOCK:
                join(ready.of(task.completion), checker.thread.clock)
            old(self, task, completion)

        return tell

    def take(old):
        def learn(self):
            taken = old(self)
            if taken is None:
                return None
            task, part = taken

            def run():
                with LOCK:
                    checker.thread.learn(ready.of(task.completion))
                part()
                with LOCK:  # whoever ends the task knows of all its parts
                    join(ready.of(task.completion), checker.thread.clock)
                    checker.thread.learn(ready.of(task.completion))

            return task, run

        return learn

    def fetched(old):
        def tell(self, task, there, part):
            with LOCK:
                join(ready.of(task.completion), checker.thread.clock)
            old(self, task, there, part)

        return tell

    return [
        *((HostWorker, "_arrived", arrived), (HostWorker, "_take", take)),
        (HostWorker, "_fetched", fetched),
    ]


def _loans(checker):
    """Let a drive's buffers be handed over: from a user to the writer, and to the next reader."""
    given, free = _Notes(), _Notes()

    def take_back(old):
        def tell(self, loan, *, changed):
            with LOCK:
                join(given.of(loan), checker.thread.clock)
            old(self, loan, changed=changed)

        return tell

    def release(old):
        def tell(self, loan):
            with LOCK:
                join(free.of(loan.memory), checker.thread.clock)
            old(self, loan)

        return tell

    def moves(notes, of, writes):
        def make(old):
            def move(self, loan):
                with LOCK:
                    checker.thread.learn(notes.of(of(loan)))
                checker.host_access([(loan.memory[: loan.extent.num_bytes], writes)])
                old(self, loan)

            return move

        return make

    return [
        (DriveLane, "_take_back", take_back),
        (DriveLane, "_release", release),
        (DriveLane, "_fill", moves(free, lambda loan: loan.memory, writes=True)),
        (DriveLane, "_store", moves(given, lambda loan: loan, writes=False)),
    ]


def _threads(checker):
    """Let who waits for a thread's end know all that the thread did."""
    ended = _Notes()

    def to_its_end(old):
        def loop(self, *args):
            old(self, *args)
            with LOCK:
                join(ended.of(threading.current_thread()), checker.thread.clock)

        return loop

    def waits(old):
        def wait(thread):
            old(thread)
            with LOCK:
                checker.thread.learn(ended.of(thread))

        return wait

    loops = [(CopyLane, "_loop"), (CopyLane, "_see_done"), (HostWorker, "_loop")]
    loops.append((DriveLane, "_loop"))
    return [
        *((owner, name, to_its_end) for owner, name in loops),
        *((module, "join", waits) for module in (copies, host_worker, lane)),
    ]


def _jobs(checker):
    """Declare what the C code does to memory, which torch does not see."""

    def sums(old):
        def encode(self):
            checker.host_access([(self.grad, False), (self.total, True)])
            return old(self)

        return encode

    def catch_ups(old):
        def encode(self):
            grads = [step.grad for step in self.steps if step.grad is not None]
            is_compact = isinstance(self, CompactJob)
            own = (
                self.state.tensors()
                if is_compact
                else (self.master, self.exp_avg, self.exp_avg_sq)
            )
            state = [*own, self.step]
            if self.upload is not None:
                state.append(self.upload.out)
            reads = ((tensor, False) for tensor in [*grads, self.active])
            checker.host_access([*reads, *((tensor, True) for tensor in state)])
            return old(self)

        return encode

    passes = [(kind, "encode", catch_ups) for kind in (CatchUpJob, CompactJob)]
    return [(SumJob, "encode", sums), *passes]


def _kernels(checker):
    """Declare what Triton's kernels do to memory, which torch does not see."""
    if reason_against_triton(torch.device("cpu")):
        return []
    from zenflow.device.kernels.triton_kernels import TritonKernels

    def declares(accesses):
        def make(old):
            def launch(self, *args):
                with _disable_current_modes():  # the interpreter's own operations are no accesses
                    result = old(self, *args)
                for made in result or ():
                    checker.on_device(made)
                reads, writes = accesses(result, *args)
                checker.device_access(
                    old.__name__,
                    [
                        *((tensor, False) for tensor in reads if tensor is not None),
                        *((tensor, True) for tensor in writes if tensor is not None),
                    ],
                )
                return result

            return launch

        return make

    def factors(move):
        return () if move is None else (move.column_factors, move.stays, move.row_factors)

    def energies(_, measured):
        return [each[0] for each in measured], [out for each in measured for out in each[1:]]

    def make_factors(_, vectors, matrices):
        reads = []
        for place, own in enumerate((vectors.columns, vectors.rows)):
            terms = [own.mean_squares, own.decay, own.floor, own.energies, own.gain]
            terms += [] if place else [vectors.shares]
            for factors in (each[place] for each in matrices):
                first = factors.storage_offset() - own.factors.storage_offset()
                reads += [term[first : first + len(factors)] for term in terms]
        return reads, [factors for each in matrices for factors in each]

    def important(rows, asked):
        read = [grad.select(1, int(i)) for grad, columns in asked for i in columns.numpy()]
        return [*read, *(columns for _, columns in asked)], rows

    def move(_, weight, grad, move):
        return [weight, grad, *factors(move)], [weight]

    def pack(_, grad, columns, packed, weight=None, move=None):
        among = slice(columns.first_column, columns.last_column)
        moved = None if weight is None else weight[:, among]
        return [grad[:, among], columns.rows[among], moved, *factors(move)], [packed, moved]

    def land(_, arrived, columns, weight, late):
        among = slice(columns.first_column, columns.last_column)
        newer = [] if late is None else [late.rows, *factors(late.move)]
        written = [weight.select(1, int(i)) for i in columns.indices.numpy()]
        return [arrived, columns.rows[among], *newer], written

    def update(_, steps, factor):
        states = [t for s in steps for t in (s.state.master, s.state.exp_avg, s.state.exp_avg_sq)]
        own = [*states, *(step.state.step for step in steps)]
        members = [member for step in steps for member in step.members]
        reads = [t for m in members for t in (m.gradient, m.columns)]
        weights = [m for m in members if m.weight is not None]
        written = [m.weight.select(1, int(i)) for m in weights for i in m.columns.numpy()]
        return [*own, *reads, factor], [*own, *written]

    kinds = (energies, make_factors, important, move, pack, land, update)
    return [(TritonKernels, kind.__name__, declares(kind)) for kind in kinds]


def _kinds(checker):
    """Tell device memory from the host's by who asks for it; there is no second kind here.

    The engine names the host by text, "cpu", and the device by what it was given.
    """

    def factory(old):
        def make(*args, **kwargs):
            made = old(*args, **kwargs)
            is_device = isinstance(kwargs.get("device"), torch.device)
            return checker.on_device(made) if is_device else made

        return make

    def moved(tensor, old, args, kwargs, *, there):
        found = old(tensor, *args, **kwargs)
        if checker.is_on_device(tensor) == there:
            return found
        copy = torch.empty(found.shape, dtype=found.dtype)
        if there:
            checker.on_device(copy)
        return copy.copy_(found)  # pageable memory: the host waits

    def to(old):
        def move(self, *args, **kwargs):
            goals = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.device)]
            likes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            if not goals and not likes:
                return old(self, *args, **kwargs)
            there = checker.is_on_device(likes[0]) if likes else True
            return moved(self, old, args, kwargs, there=there)

        return move

    def cpu(old):
        return lambda self: moved(self, old, (), {}, there=False)

    def tolist(old):
        def read(self):
            checker.host_access([(self, False)])
            return old(self)

        return read

    names = ("empty", "zeros", "ones", "full", "tensor")
    methods = [(torch.Tensor, "to", to), (torch.Tensor, "cpu", cpu)]
    return [*((torch, name, factory) for name in names), *methods,
            (torch.Tensor, "tolist", tolist)]  # fmt: skip
