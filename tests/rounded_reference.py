"""The exact rule with gradients that leave the device in eight bits, as a plain loop."""

import torch

from tests.compact_reference import CompactBlock, CompactReference
from tests.reference import ExactBlock, Reference


def rounded(matrix):
    """Round each column to four bits, relative to the largest number of each 64 rows."""
    parts = []
    for part in matrix.double().split(64):
        size = part.abs()
        unit = torch.ldexp(torch.ones_like(size), torch.frexp(size)[1] - 4)  # of the fourth bit
        near = (size / unit).round() * unit
        top = torch.frexp(near.amax(0))[1] - 1  # of the largest number, rounded
        smallest = 1.125 * torch.ldexp(torch.ones_like(part[0]), top - 15)
        near = torch.where(near < smallest, torch.where(2 * size > smallest, smallest, 0.0), near)
        parts.append(near * part.sign())
    return torch.cat(parts).float()


class RoundedGradients:
    """A block whose deferred columns have rounded gradients."""

    def sent(self, grad):
        return torch.where(self.important, grad, rounded(grad))


class RoundedBlock(RoundedGradients, ExactBlock):
    """A block with float32 state."""


class RoundedCompactBlock(RoundedGradients, CompactBlock):
    """A block with compact state."""


class RoundedReference(Reference):
    """Feed `step` gradients, read `weights`."""

    block = RoundedBlock


class RoundedCompactReference(CompactReference):
    """Feed `step` gradients, read `weights`; `eval` shows the true ones."""

    made = RoundedCompactBlock
