"""A drive by itself: reads, writes, and both at once, as the engine makes them."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sim.hardware.components import Nvme
from sim.hardware.quantity import Quantity
from zenflow.drive import disk
from zenflow.drive.lane import READERS, WRITERS
from zenflow.errors import ConfigError
from zenflow.host import memory as host_memory
from zenflow.rule.sizes import EXTENT_ELEMENTS, SECTOR

FILE_BYTES = 2 << 30
"""Bytes of the file that is written and read."""
RECORD_BYTES = 12 * EXTENT_ELEMENTS
"""Bytes of a record: an extent of float32 states."""
_TAIL = 0.5
"""Share of the first pass of writes, at its end, whose rate counts: a cache fills before."""


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes per second of a drive."""

    read: float
    write: float
    """Rate of the later half of the writes, which a cache serves less."""
    first_write: float
    """Rate of the earlier half."""
    both: float
    """Rate of reads and writes at once, together."""
    num_bytes: int
    """Bytes of the file."""
    is_direct: bool
    """Whether access was direct, around the system's own cache."""

    def to_nvme(self, folder: Path) -> Nvme:
        """Return the drive as a part of a profile; its capacity is the folder's free room."""
        how = f"{self.num_bytes / 2**30:.2g} GiB, {'direct' if self.is_direct else 'not direct'}"

        def measured(value: float, what: str) -> Quantity:
            return Quantity(value=value, kind="measured", source=f"{what}, {how}")

        return Nvme(
            name="measured",
            read=measured(self.read, "reads"),
            write=measured(self.write, "later half of writes"),
            capacity=measured(float(disk.free_bytes(folder)), "free room, behind a file"),
            duplex=measured(min(1.0, self.both / (self.read + self.write)), "both at once"),
        )


def check_drive(folder: Path, file_bytes: int = FILE_BYTES) -> None:
    """Refuse a folder that is no drive, or has too little room.

    Raises:
        ConfigError: The folder can't be measured.
    """
    if not folder.is_dir():
        raise ConfigError(f"--drive {folder} is no folder: make it on the drive to measure")
    if disk.file_system(folder) in ("tmpfs", "ramfs"):
        raise ConfigError(f"--drive {folder} is in memory: name a folder on a drive")
    if (free := disk.free_bytes(folder)) < 2 * file_bytes:
        raise ConfigError(
            f"--drive {folder} has {free / 2**30:.1f} GiB free, and measuring it takes "
            f"{2 * file_bytes / 2**30:g} GiB: make room, or name another folder"
        )


def measure_drive(
    folder: Path, file_bytes: int = FILE_BYTES, record_bytes: int = RECORD_BYTES
) -> DriveRates:
    """Return the rates of a folder's drive, by a file of its own that is gone afterwards.

    The file is written once and a half, and read as often.

    Args:
        folder: Folder on the drive.
        file_bytes: Bytes of the file, as many records as fit.
        record_bytes: Bytes of a record, in whole sectors.

    Raises:
        ConfigError: The folder is no drive, or has too little room.
        OSError: The drive fails.
    """
    check_drive(folder, file_bytes)
    assert record_bytes % SECTOR == 0
    offsets = range(0, max(2, file_bytes // record_bytes) * record_bytes, record_bytes)
    with _own_file(folder, len(offsets) * record_bytes) as (file, is_direct):
        late = round(len(offsets) * (1 - _TAIL))
        users = _Users(file, record_bytes)
        with users.pool:
            first = users.seconds(disk.write, offsets[:late])
            second = users.seconds(disk.write, offsets[late:])
            read = users.seconds(disk.read, offsets)
            both = users.rate_of_both(offsets)
    return DriveRates(
        read=len(offsets) * record_bytes / read,
        write=(len(offsets) - late) * record_bytes / second,
        first_write=late * record_bytes / first,
        both=both,
        num_bytes=len(offsets) * record_bytes,
        is_direct=is_direct,
    )


class _Users:
    """Threads that read and write records of one file, as many as the engine's."""

    def __init__(self, file: int, record_bytes: int) -> None:
        self._file = file
        count = READERS + WRITERS
        slab = host_memory.zeroed(count * record_bytes, torch.uint8, forks=False).numpy()
        slab[:] = np.random.default_rng(0).integers(0, 256, len(slab), dtype=np.uint8)
        self._memories = list(slab.reshape(count, record_bytes))
        self.pool = ThreadPoolExecutor(count)

    def rate_of_both(self, offsets: range) -> float:
        """Return the bytes per second of reads and writes at once, until either has no more."""
        half, over, moved = len(offsets) // 2, threading.Event(), []

        def own(number: int) -> None:
            call = disk.read if number < READERS else disk.write
            part = offsets[:half] if number < READERS else offsets[half:]
            for offset in part[number % READERS :: READERS]:
                if over.is_set():
                    return
                call(self._file, self._memories[number], offset)
                moved.append(self._memories[number].nbytes)
            over.set()

        started = time.perf_counter()
        list(self.pool.map(own, range(READERS + WRITERS)))
        disk.sync_data(self._file)
        return sum(moved) / (time.perf_counter() - started)

    def seconds(self, call: Callable[[int, np.ndarray, int], None], offsets: range) -> float:
        """Return the seconds of a call on each record, two at a time, until the drive has all."""
        started = time.perf_counter()
        memories = self._memories[:READERS]

        def own(number: int) -> None:
            for offset in offsets[number :: len(memories)]:
                call(self._file, memories[number], offset)

        list(self.pool.map(own, range(len(memories))))
        if call is disk.write:
            disk.sync_data(self._file)
        return time.perf_counter() - started


@contextmanager
def _own_file(folder: Path, num_bytes: int) -> Iterator[tuple[int, bool]]:
    with tempfile.TemporaryDirectory(prefix=".zenflow-drive-", dir=folder) as own:
        file, is_direct = disk.open_states(Path(own) / "records")
        try:
            disk.allocate(file, num_bytes)
            yield file, is_direct
        finally:
            os.close(file)
