"""The ring: device memory through which gradients leave in release mode, on a GPU.

Backward packs gradients into it, and goes on once the link has carried what it can't hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from sim.machine import Machine


class Ring:
    """Device buffer in which packed gradients wait for the link.

    Attributes:
        capacity: Bytes.
        waiting: Bytes of each copy that may not be over yet, and the events of its end and of
            those who read them.
    """

    def __init__(self, machine: Machine, capacity: float) -> None:
        """Start empty."""
        self._machine = machine
        self.capacity = capacity
        self.waiting: list[tuple[float, list[simpy.Event]]] = []

    def send(
        self,
        num_bytes: float,
        step: int,
        backward: tuple[simpy.Event, simpy.Event],
        after: list[simpy.Event],
        readers: Sequence[simpy.Event] = (),
    ) -> tuple[simpy.Event, list[simpy.Event]]:
        """Queue the copies of a segment's gradients.

        Args:
            num_bytes: Of them.
            step: Their step.
            backward: Begin and end of the segment's backward.
            after: What else must have happened.
            readers: Ends of uploads that read the gradients where they lie.

        Returns:
            The end of the last copy, and what backward has to wait for before it goes on.
        """
        begun, passed = backward
        last = min(num_bytes, self.capacity)  # what may still wait when backward goes on
        if num_bytes > last:
            self._copy(num_bytes - last, step, [begun, *after])
        copied = self._copy(last, step, [passed, *after])
        self.waiting[-1][1].extend(readers)
        return copied, self._room()

    def _copy(self, num_bytes: float, step: int, after: list[simpy.Event]) -> simpy.Event:
        copied = self._machine.d2h.submit("grads", step, self._machine.down(num_bytes), after)
        self.waiting.append((num_bytes, [copied]))
        return copied

    def _room(self) -> list[simpy.Event]:
        """Return the events that must be over for the ring to hold its newest contents, if any."""
        filled, place = sum([size for size, _ in self.waiting]), 0
        while filled > self.capacity:
            filled -= self.waiting[place][0]
            place += 1
        readers = [event for _, own in self.waiting[:place] for event in own]
        del self.waiting[:place]
        return [event for event in readers if event.callbacks is not None]
