"""Large host memory: whole pages, huge ones where the system has them."""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 21
"""Size of a huge page; less memory than that comes from the heap, unless it is for a GPU."""


def zeroed(num_elements: int, dtype: torch.dtype, *, forks: bool = True) -> Tensor:
    """Return a zeroed vector; a large one has pages that nothing else lies on.

    A pass over gigabytes in pages of 4 KiB looks most addresses up in memory; huge pages end
    that. Linux gives them where `transparent_hugepage` is `madvise` or `always`.

    Args:
        num_elements: Number of elements.
        dtype: Their type.
        forks: Whether a forked process, such as a DataLoader's worker, sees the memory. Memory
            that a GPU reads must not be copied when such a process writes. It has whole pages
            whatever its size: CUDA pins pages, and pins none twice.

    Raises:
        MemoryError: The system gives no more.
    """
    num_bytes = num_elements * dtype.itemsize
    try:
        return _zeroed(num_elements, num_bytes, dtype, forks=forks)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_refused(error):
            raise
        raise MemoryError(
            f"the system gives no {num_bytes:,} bytes of host memory for the optimizer's state: "
            "free some, or raise the limit (ulimit -v, or the container's)"
        ) from error


def is_refused(error: BaseException) -> bool:
    """Whether an error says that the host has no more memory: Python's, the system's, torch's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _zeroed(num_elements: int, num_bytes: int, dtype: torch.dtype, *, forks: bool) -> Tensor:
    is_small = num_bytes < _LEAST_BYTES and forks
    if is_small or not num_bytes or not hasattr(mmap.mmap, "madvise"):
        return torch.zeros(num_elements, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, num_bytes)
    for advice in ("MADV_HUGEPAGE", *(() if forks else ("MADV_DONTFORK",))):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel built without it: the memory works as it is
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=dtype)
