"""Matrices in a vector of bytes: the same one at every time, and never too many remembered."""

import torch

from zenflow.columns import byte_memory
from zenflow.columns.byte_memory import ByteMemory


def test_a_matrix_is_made_once_for_each_place_shape_and_dtype():
    memory = ByteMemory(torch.zeros(1024, dtype=torch.uint8))
    matrix = memory.matrix(64, (3, 4), torch.float32)
    assert memory.matrix(64, (3, 4), torch.float32) is matrix
    others = [
        memory.matrix(128, (3, 4), torch.float32),
        memory.matrix(64, (4, 3), torch.float32),
        memory.matrix(64, (3, 4), torch.bfloat16),
    ]
    assert all(other is not matrix for other in others)
    matrix.fill_(1.0)
    assert memory.data.view(torch.float32)[16:28].eq(1.0).all()
    assert memory.data.view(torch.float32).sum() == 12


def test_matrices_at_ever_new_places_are_not_all_remembered(monkeypatch):
    monkeypatch.setattr(byte_memory, "MOST_KNOWN", 4)
    memory = ByteMemory(torch.arange(64, dtype=torch.uint8))
    for first in [*range(32), *range(32)]:
        assert memory.matrix(first, (2, 3), torch.uint8).tolist() == [
            [first, first + 1, first + 2],
            [first + 3, first + 4, first + 5],
        ]
        assert len(memory._known) <= 4
