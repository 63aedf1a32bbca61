"""The ring: device memory through which gradients leave in release mode, on a GPU.

Backward packs gradients into it, and goes on once the link has carried what it can't hold.
"""

from __future__ import annotations

from functools import partial

import simpy

from sim.machine import Machine


class Ring:
    """What waits on the device for the link.

    Attributes:
        capacity: Bytes.
        pressed: Seconds in which backward waited for room, since last reset.
    """

    def __init__(self, machine: Machine, capacity: float) -> None:
        """Start empty."""
        self._machine = machine
        self.capacity = capacity
        self.pressed = 0.0
        self._waiting: list[tuple[float, simpy.Event]] = []

    def send(
        self,
        num_bytes: float,
        step: int,
        backward: tuple[simpy.Event, simpy.Event],
        after: list[simpy.Event],
    ) -> tuple[simpy.Event, list[simpy.Event]]:
        """Queue the copies of a segment's gradients.

        Args:
            num_bytes: Of them.
            step: Their step.
            backward: Begin and end of the segment's backward.
            after: What else must have happened.

        Returns:
            The end of the last copy, and what backward has to wait for before it goes on.
        """
        begun, passed = backward
        last = min(num_bytes, self.capacity)  # what may still wait when backward goes on
        if num_bytes > last:
            self._copy(num_bytes - last, step, [begun, *after])
        copied = self._copy(last, step, [passed, *after])
        return copied, self._room(passed, step)

    def _copy(self, num_bytes: float, step: int, after: list[simpy.Event]) -> simpy.Event:
        copied = self._machine.d2h.submit("grads", step, self._machine.down(num_bytes), after)
        self._waiting.append((num_bytes, copied))
        return copied

    def _room(self, passed: simpy.Event, step: int) -> list[simpy.Event]:
        """Return the copy, if any, that must be done for the ring to hold what came after it."""
        filled = 0.0
        for place in reversed(range(len(self._waiting))):
            num_bytes, copied = self._waiting[place]
            filled += num_bytes
            if filled > self.capacity:
                del self._waiting[: place + 1]
                self._measure(passed, copied, step)
                return [copied]
        return []

    def _measure(self, passed: simpy.Event, copied: simpy.Event, step: int) -> None:
        """Let the time be recorded that backward, once passed, waits for the copy."""

        def wait(_: simpy.Event) -> None:
            if copied.callbacks is not None:  # else it is over, and backward does not wait
                copied.callbacks.append(partial(self._press, self._machine.env.now, step))

        passed.callbacks.append(wait)

    def _press(self, since: float, step: int, _: simpy.Event) -> None:
        self.pressed += self._machine.env.now - since
        self._machine.stall("d2h", since, step)
