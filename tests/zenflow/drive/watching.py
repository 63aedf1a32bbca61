"""Watches the extents that are in memory."""

from zenflow.drive.lane import DriveLane


class Watched:
    """Counts the loans whose extents are in buffers at a time."""

    def __init__(self, monkeypatch):
        self.most_in_memory = 0
        self._here = set()
        fill, release = DriveLane._fill, DriveLane._release

        def filling(lane, loan):
            self._here.add(loan)
            self.most_in_memory = max(self.most_in_memory, len(self._here))
            return fill(lane, loan)

        def releasing(lane, loan):
            self._here.discard(loan)
            release(lane, loan)

        monkeypatch.setattr(DriveLane, "_fill", filling)
        monkeypatch.setattr(DriveLane, "_release", releasing)
