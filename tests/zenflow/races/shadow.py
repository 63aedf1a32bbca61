"""Shadow memory: for every byte, who wrote and read it last, and when."""

import sys
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from torch.multiprocessing.reductions import StorageWeakRef

NEVER = 1 << 60
_DEPTH = 3


class Shadow:
    """What is known of one storage."""

    def __init__(self, storage, *, on_device, stream):
        size = storage.nbytes()
        self.nbytes, self.on_device, self.stream = size, on_device, stream
        self.ref = StorageWeakRef(storage)
        self.where = place()
        self.writer, self.writer_op = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.written = np.zeros(size, np.int64)
        self.reads = {}
        self.users, self.kept_for = {}, set()
        """Streams other than the allocating one that have used it, with the agent's rank, time and
        operation of the last use; and those that the allocator was told of."""


@cache
def _module(file):
    """Return the name of a module of the package, by its file; None for any other file."""
    path = Path(file)
    return path.stem if "zenflow" in path.parts and "tests" not in path.parts else None


def place():
    """Return the innermost lines of the package that are running."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < _DEPTH:
        if (module := _module(frame.f_code.co_filename)) is not None:
            lines.append(f"{module}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "the loop"


def bytes_of(tensor):
    """Return the offsets of a view's bytes in its storage, an index array or a slice."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if tensor.is_contiguous():
        return slice(first * size, (first + tensor.numel()) * size)
    return _offsets(first, tensor.shape, tensor.stride(), size)


@lru_cache(maxsize=4096)
def _offsets(first, shape, strides, size):
    at = np.zeros((), np.int64) + first
    for length, stride in zip(shape, strides, strict=True):
        at = at[..., None] + np.arange(length) * stride
    return (at.reshape(-1, 1) * size + np.arange(size)).reshape(-1)


class Memory:
    """All storages that were touched, and the races that were found."""

    def __init__(self):
        self.races = {}
        """Number of times that each was met, by its text."""
        self._shadows = {}
        self._shared = {}
        """Those that several streams have used, by the same keys."""
        self._agents, self._ops, self._op_names = {}, {}, [""]

    def race(self, text):
        self.races[text] = self.races.get(text, 0) + 1

    def shadow(self, tensor, *, on_device=None, stream=None, is_new=False):
        """Return the shadow of a tensor's storage; a storage that is new is on the host."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        found = self._shadows.get(key)
        if found is not None and (
            is_new or found.ref.expired() or found.nbytes != storage.nbytes()
        ):
            self._end(key)
            found = None
        if found is None:
            found = Shadow(storage, on_device=bool(on_device), stream=stream)
            self._shadows[key] = found
        if on_device is not None:
            found.on_device, found.stream = on_device, found.stream or stream
        return found

    def sweep(self):
        """Look at memory that has been freed since, where several streams used it."""
        for key in [key for key, shadow in self._shared.items() if shadow.ref.expired()]:
            self._end(key)

    def end(self, key):
        """Look at memory that is being freed; the key is its address."""
        if key in self._shadows:
            self._end(key)

    def _end(self, key):
        shadow = self._shadows.pop(key)
        self._shared.pop(key, None)
        for user, (rank, time, op) in shadow.users.items():
            if user not in shadow.kept_for and not shadow.stream.knows(rank, time):
                self.race(
                    f"memory of {shadow.stream.name} ({shadow.where}) is free for it again while "
                    f"{user.name} may still use it [{op}]"
                )

    def access(self, agent, tensor, op, *, writes):
        """Compare an access with those before it, and note it; the agent has begun it."""
        if tensor.numel() == 0:
            return
        shadow, at = self.shadow(tensor), bytes_of(tensor)
        self._agents[agent.rank] = agent
        time, number = agent.clock[agent.rank], self._number(op)
        kind = "write" if writes else "read"
        writers, written = shadow.writer[at], shadow.written[at]
        for other in set(writers.tolist()):
            late = (writers == other) & (written > self._seen(agent, other))
            if late.any():
                before = shadow.writer_op[at][late.argmax()]
                self._unordered(agent, kind, op, other, "write", before)
        if writes:
            for other, (times, ops) in shadow.reads.items():
                late = times[at] > self._seen(agent, other)
                if late.any():
                    self._unordered(agent, kind, op, other, "read", ops[at][late.argmax()])
            shadow.writer[at], shadow.written[at], shadow.writer_op[at] = agent.rank, time, number
        else:
            if agent.rank not in shadow.reads:
                blank = np.zeros(shadow.nbytes, np.int64), np.zeros(shadow.nbytes, np.int32)
                shadow.reads[agent.rank] = blank
            times, ops = shadow.reads[agent.rank]
            times[at], ops[at] = time, number
        if shadow.on_device and agent.stream not in (None, shadow.stream):
            shadow.users[agent.stream] = (agent.rank, time, op)
            self._shared[tensor.untyped_storage().data_ptr()] = shadow

    def _seen(self, agent, other):
        """Return the time up to which an agent knows another's accesses."""
        return NEVER if other in (0, agent.rank) else agent.clock.get(other, 0)

    def _number(self, op):
        if op not in self._ops:
            self._ops[op] = len(self._op_names)
            self._op_names.append(op)
        return self._ops[op]

    def _unordered(self, agent, kind, op, other, before, number):
        name = self._agents[other].name
        self.race(
            f"{kind} by {agent.name} [{op}] has no order with the {before} by {name} "
            f"[{self._op_names[number]}]"
        )
