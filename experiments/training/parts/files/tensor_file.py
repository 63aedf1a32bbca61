"""Tensors as a safetensors file, written from where they lie and hashed on the way.

The library's own writer wants every tensor alone in its storage. The optimizer's are views of a
few slabs, so it would have to be given a second copy of all host memory; here at most one tensor
is copied at a time. The library reads the file.

The hash is XXH3 of 128 bits: 13 GB/s on a core where SHA-256 does 0.9 and BLAKE2 0.5, so that it
is lost beside the disk even for 100 GB. It finds accidents; it is no proof against forgery.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from zenflow.errors import naming_file

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 1 << 24
"""Bytes hashed and written in turn."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the tensors, have them on the disk, and return the file's checksum.

    Raises:
        OSError: The file can't be written.
        TypeError: A tensor is of a type that no checkpoint holds.
    """
    # Widest first, as the format has it: every tensor then begins at a multiple of its element.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _header(ordered)
    checksum = xxhash.xxh3_128()
    with naming_file(path), open(path, "wb") as file:
        for part in chain((header,), (_bytes_of(tensor) for _, tensor in ordered)):
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                checksum.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return checksum.hexdigest()


def read_tensors(path: Path, checksum: str) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU, its pages mapped until they are used.

    Raises:
        OSError: The file can't be read.
        ValueError: Its content is not what was written.
    """
    found = file_checksum(path)
    if found != checksum:
        raise ValueError(f"the checksum of {path.name} is {found} in place of {checksum}")
    return load_file(path)


def file_checksum(path: Path) -> str:
    """Return the hash of a file's content.

    Raises:
        OSError: It can't be read.
    """
    found = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(buffer[:count])
    return found.hexdigest()


def text_checksum(text: str) -> str:
    """Return the same kind of checksum of a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def _header(ordered: list[tuple[str, Tensor]]) -> memoryview:
    """Return the format's first bytes: a length, then JSON that says where every tensor lies."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise TypeError(f"a checkpoint can't hold {tensor.dtype}, but {name} is of it")
        end = position + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    held = tensor.detach().to("cpu").contiguous()
    plain: Any = held.reshape(-1).view(torch.uint8).numpy()  # numpy's buffer has no type
    return memoryview(plain)
