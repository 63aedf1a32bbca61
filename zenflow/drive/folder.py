"""State folder: one run's extents on a drive, of which the last checkpoint is always whole.

Each extent has two places. The first write after a checkpoint goes to the place that the
checkpoint does not name, and later writes stay there. So a checkpoint is a flush and a new
manifest: no state is copied, and whatever ends the process or the power, the checkpoint's extents
are as they were.

A checkpoint's other half, such as the device's tensors, is saved by the program a little later.
Until the next write the manifest names the checkpoint before too, so that a program that ends in
between goes on from that one.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zenflow.drive import disk
from zenflow.drive.extents import Extent
from zenflow.drive.lock import FolderLock, check_folder
from zenflow.drive.manifest import Generation, Manifest, checksum
from zenflow.errors import CheckpointError
from zenflow.report import readable

_log = logging.getLogger(__name__)

_STATES = "states.bin"
_UNWRITTEN = "-"


class StateFolder:
    """Folder with the states of one run.

    Attributes:
        path: The folder.
        states: The file with all extents.
        manifest: What the folder's manifest says.
        is_direct: Whether reads and writes go past the system's file cache.
    """

    def __init__(self, path: Path, kind: Mapping[str, Any], extents: Sequence[Extent]) -> None:
        """Open a folder; its extents are those of zeros until a checkpoint is opened.

        Args:
            path: The folder, empty or of an earlier run of the same kind.
            kind: Parameters and format of the states.
            extents: All extents.

        Raises:
            ValueError: The folder can't be used; the message says why, and what to do.
            CheckpointError: Its manifest or its states are damaged.
        """
        self.path, self.states = path, path / _STATES
        self._extents = extents
        self._lock = threading.Lock()
        check_folder(path)
        self._folder_lock = FolderLock(path)
        self._file = -1
        try:
            found = Manifest.load(path)
            if found is not None and found.newest is not None:
                self.manifest = found
                self._check_kind(kind)
                self._open_file()
                self._check_length()
            else:
                if found is None and self.states.exists():
                    raise ValueError(
                        f"{path} has a {_STATES} without a manifest, which no run of this kind "
                        "has left: choose another folder"
                    )
                self.manifest = Manifest(uuid.uuid4().hex, dict(kind), 0, ())
                self._begin()
        except BaseException:
            self.close()
            raise
        self._is_claimed = not self.manifest.generations
        self._base: Generation | None = None
        """Checkpoint whose places are not written: the last one made or opened here."""
        self._places = [_UNWRITTEN] * len(extents)
        self._checksums = [""] * len(extents)
        self._written_before = self.manifest.written_bytes
        self._is_changed = True
        self.read_bytes = self.written_bytes = self._portable_bytes = 0

    # ---- begin ------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of the file with all extents, two places for each."""
        return 2 * sum(extent.num_bytes for extent in self._extents)

    def _begin(self) -> None:
        """Reserve the room of all extents."""
        free = disk.free_bytes(self.path)
        if self.states.exists():  # of a run that ended before its first checkpoint
            free += self.states.stat().st_blocks * 512
        refusal = (
            f"{self.path} has {readable(free)} free, and the states take "
            f"{readable(self.num_bytes)}: two places for each, so that a checkpoint stays whole. "
            'Free some, use another drive, or host_state="compact"'
        )
        if free < self.num_bytes:
            raise ValueError(refusal)
        self.manifest.save(self.path)
        self._open_file()
        try:
            disk.allocate(self._file, max(1, self.num_bytes))
        except OSError as error:
            self.states.unlink()
            raise ValueError(f"{refusal} ({error})") from error

    def _open_file(self) -> None:
        self._file, self.is_direct = disk.open_states(self.states)
        if not self.is_direct:
            _log.warning(
                "%s: its file system (%s) has no direct access, so that states pass the system's "
                "file cache, which costs host memory and time",
                self.path,
                disk.file_system(self.path) or "unknown",
            )

    def _check_kind(self, kind: Mapping[str, Any]) -> None:
        """Refuse the folder of a run with other parameters, or another format of states."""
        there, newest = self.manifest.kind, self.manifest.newest
        for name, own in kind.items():
            other = there.get(name)
            if other == own:
                continue
            what = f"{name} is {other} there and {own} here"
            if isinstance(own, list) and isinstance(other, list):
                pairs = zip(other, own, strict=False)
                first = next((f"{a} there, {b} here" for a, b in pairs if a != b), "their number")
                what = f"{len(other)} {name} there, {len(own)} here; first difference: {first}"
            raise ValueError(
                f"{self.path} has the states of another run, at step {newest and newest.step}: "
                f"{what}. Choose an empty folder, or go on with that run's model and settings"
            )

    def _check_length(self) -> None:
        size = os.fstat(self._file).st_size
        if size < self.num_bytes:
            raise CheckpointError(
                f"{self.states} has {size:,} bytes, and its extents take {self.num_bytes:,}: the "
                "file was cut off. Resume from a portable state in another folder"
            )

    # ---- extents ----------------------------------------------------------------------------

    @property
    def is_claimed(self) -> bool:
        """Whether extents may be written: no checkpoint is here that nobody has opened."""
        return self._is_claimed

    def claim(self) -> None:
        """Refuse to write where a checkpoint is that nobody has opened.

        Raises:
            CheckpointError: The folder has one.
        """
        if not self._is_claimed:
            assert self.manifest.newest is not None
            raise CheckpointError(
                f"{self.path} has the checkpoint of step {self.manifest.newest.step}, which other "
                "states would overwrite: go on from it by load_state_dict() (zenflow train "
                "--resume), or choose another folder"
            )

    def read(self, extent: Extent, memory: np.ndarray, *, weights_only: bool) -> int:
        """Fill memory with an extent, or its weights; return the bytes that were read."""
        place = self._places[extent.index]
        num_bytes = extent.weight_bytes if weights_only else extent.num_bytes
        if place == _UNWRITTEN:
            memory[:num_bytes] = 0
            return 0
        disk.read(self._file, memory[:num_bytes], extent.place(int(place)))
        with self._lock:
            self.read_bytes += num_bytes
        return num_bytes

    def write(self, extent: Extent, memory: np.ndarray) -> int:
        """Write an extent to the place that no checkpoint names; return its bytes."""
        with self._lock:
            self._retire()
            place = self._free_place(extent.index)
        content = memory[: extent.num_bytes]
        disk.write(self._file, content, extent.place(place))
        digest = checksum(content)
        with self._lock:
            self._places[extent.index], self._checksums[extent.index] = str(place), digest
            self.written_bytes += len(content)
            return len(content)

    def forget(self, extents: Sequence[Extent]) -> None:
        """Let extents be zeros."""
        self.claim()
        for extent in extents:
            self._places[extent.index], self._checksums[extent.index] = _UNWRITTEN, ""
        self._is_changed = True

    def _free_place(self, index: int) -> int:
        kept = _UNWRITTEN if self._base is None else self._base.places[index]
        return 0 if kept == _UNWRITTEN else 1 - int(kept)

    def _retire(self) -> None:
        """Name no place any more that may be written, at the first write after a checkpoint."""
        self._is_changed = True
        kept = () if self._base is None else (self._base,)
        if self.manifest.generations != kept:
            self._save(kept)

    # ---- checkpoints ------------------------------------------------------------------------

    @property
    def all_written_bytes(self) -> int:
        """Bytes that were written to the folder, by earlier processes too."""
        return self._written_before + self.written_bytes + self._portable_bytes

    def note_written(self, num_bytes: int) -> None:
        """Count bytes of other files in the folder, which wear the drive too."""
        self._portable_bytes += num_bytes

    def commit(self, step: int) -> Generation:
        """Let the extents as they are be a checkpoint, and return it; no write is under way.

        Where nothing has changed since the last one, the last one is returned.

        Raises:
            CheckpointError: The drive fails; the last checkpoint is whole.
        """
        if self._base is not None and not self._is_changed:
            return self._base
        newest = self.manifest.newest
        number = 1 if newest is None else newest.number + 1
        made = Generation(number, step, "".join(self._places), tuple(self._checksums))
        try:
            disk.sync_data(self._file)
            self._save((made,) if self._base is None else (self._base, made))
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint of step {step} can be made in {self.path} ({error}); "
                f"{self.last_checkpoint()}"
            ) from error
        self._base, self._is_changed = made, False
        return made

    def revert(self) -> None:
        """Let the checkpoint before the last one be kept: the last one's other half was not saved.

        After the first write behind a checkpoint nothing changes: the one before is gone.
        """
        if len(self.manifest.generations) > 1:
            self._base, self._is_changed = self.manifest.generations[0], True
            self._save((self._base,))

    def _save(self, generations: Sequence[Generation]) -> None:
        # Noted first: one whose saving fails may be there, and is replaced at the next write.
        self.manifest = self.manifest.with_generations(generations, self.all_written_bytes)
        self.manifest.save(self.path)

    def generation(self, run: str, number: int) -> Generation:
        """Return a checkpoint of this folder.

        Raises:
            CheckpointError: The folder is another run's, or does not have that checkpoint any
                more.
        """
        if run != self.manifest.run:
            raise CheckpointError(
                f"the state refers to the drive of another run than that in {self.path}: make the "
                "optimizer with the state_dir that it was saved with"
            )
        for one in self.manifest.generations:
            if one.number == number:
                return one
        there = ", ".join(f"{one.number} (step {one.step})" for one in self.manifest.generations)
        raise CheckpointError(
            f"{self.path} has checkpoint {there or 'none'}, and the state refers to {number}: a "
            "drive has the last checkpoint only. Load the state that was saved with that one, or "
            "a portable state"
        )

    def check(self, generation: Generation, extent: Extent, memory: np.ndarray) -> None:
        """Read a checkpoint's extent, and compare its bytes with their checksum.

        Raises:
            CheckpointError: They differ, or can't be read.
        """
        place = generation.places[extent.index]
        if place == _UNWRITTEN:
            return
        content = memory[: extent.num_bytes]
        why = "has other bytes than were written: the drive, or somebody else, changed them"
        try:
            disk.read(self._file, content, extent.place(int(place)))
        except OSError as error:
            why = f"can't be read ({error})"
        else:
            if checksum(content) == generation.checksums[extent.index]:
                return
        raise CheckpointError(
            f"extent {extent.index} of {self.states} {why}. Resume from a portable state in "
            "another folder"
        )

    def open(self, generation: Generation) -> None:
        """Go on from a checkpoint of this folder; no read or write is under way."""
        self._places, self._checksums = list(generation.places), list(generation.checksums)
        self._base, self._is_claimed, self._is_changed = generation, True, False

    def last_checkpoint(self) -> str:
        """Return a few words on the checkpoint that remains, for messages."""
        if self._base is None:
            return f"{self.path} has no checkpoint yet"
        return f"the checkpoint of step {self._base.step} in {self.path} is whole"

    def close(self) -> None:
        """Close the file, and let others use the folder."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._folder_lock.end()
