"""Vector clocks of streams and host threads."""

import bisect
import itertools
import threading

LOCK = threading.RLock()
"""Guards all clocks and all shadow memory."""


def join(clock, other):
    """Let a clock know what another knows."""
    for agent, time in other.items():
        if time > clock.get(agent, 0):
            clock[agent] = time


def knows(clock, other):
    """Whether a clock knows all that another knows."""
    return all(time <= clock.get(agent, 0) for agent, time in other.items())


class Agent:
    """What does one thing after another: a host thread, or what one launches on a stream."""

    _ranks = itertools.count(1)

    def __init__(self, name, stream=None):
        self.name, self.stream = name, stream
        self.rank = next(self._ranks)
        self.clock = {self.rank: 0}

    def tick(self):
        """Begin the agent's next access, and return its time."""
        self.clock[self.rank] += 1
        return self.clock[self.rank]

    def learn(self, clock):
        """Let the agent know what a clock knows."""
        with LOCK:
            join(self.clock, clock)

    def told(self):
        """Return what the agent knows now."""
        with LOCK:
            return dict(self.clock)


class Stream:
    """A stream. Launches of two threads come in an order only if the threads have one."""

    def __init__(self, name):
        self.name = name
        self._launches = {}
        """Of each thread: its agent on the stream, the thread's times at its launches, and what
        the agent knew then."""

    def launch(self, thread, clock=None):
        """Return the agent of a launch by a thread, which comes after a clock as well."""
        with LOCK:
            agent, times, clocks = self._launches.setdefault(
                thread.rank, (Agent(f"{self.name} of {thread.name}", self), [], [])
            )
            for known in (self.seen_by(thread), thread.clock, clock or {}):
                join(agent.clock, known)
            agent.tick()
            times.append(thread.tick())
            clocks.append(dict(agent.clock))
            return agent

    def seen_by(self, thread):
        """Return what has been launched on the stream for certain, as a thread knows it."""
        with LOCK:
            found = {}
            for rank, (_, times, clocks) in self._launches.items():
                known = len(times) if rank == thread.rank else _count(times, thread.clock, rank)
                if known:
                    join(found, clocks[known - 1])
            return found

    def knows(self, rank, time):
        """Whether anything launched on the stream comes after an agent's access."""
        return any(a.clock.get(rank, 0) >= time for a, _, _ in self._launches.values())


def _count(times, clock, rank):
    return bisect.bisect_right(times, clock.get(rank, 0))


class Threads(threading.local):
    """The calling thread as an agent, and the stream that it launches on."""

    def __init__(self):
        self.agent = Agent(threading.current_thread().name)
        self.stream = None
