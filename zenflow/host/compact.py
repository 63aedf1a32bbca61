"""Compact host state: AdamW's weights and moments of a row in five bytes an element.

A row is cut into groups of 64 elements; the last group may be shorter. For each element there are

- the weight's 24 highest bits: the nearest bfloat16, and a signed byte that counts 1/256 of its
  last place from there,
- the first moment as a sign, four bits of exponent and three of mantissa,
- the second moment as five bits of exponent and three of mantissa,

and for each group one exponent byte for each moment, which the elements' exponents are counted
from: 5 + 2 / 64 bytes. With e the group's byte, a code c means the float32 whose bits are
(c + 8 e) << 20, and 0 means 0. The group's largest element has one octave of room above it.

Everything is rounded at random, up as often as it lies nearer to the upper neighbour. Rounding to
nearest would lose what a small learning rate adds to a weight, and let a second moment stop before
it has decayed. The random bits are a function of a key and the element's number, so that threads,
cuts and ranks change no bit. The arithmetic is that of integers: codes are parts of a float32's
bits.

These are the torch operations that the compiled kernel agrees with bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zenflow.host_state import GROUP, num_groups

NEAREST: tuple[int, int] = (0x80, 0x80000)
"""Bits that round to nearest, in place of random ones: of the weight, and of a moment."""

_MOST_FIRST, _MOST_SECOND = 127, 255
"""Largest codes of the moments."""
_ROOM_FIRST, _ROOM_SECOND = 14, 30
"""Octaves from a group's exponent byte to its largest element's exponent, one more being free."""
_BITS = 20
"""Bits of a float32 below a moment's code."""
_ODD = (0x9E3779B1, 0xC2B2AE35, 0x85EBCA6B)
"""Steps of the sequences of random bits, from element to element: of the weight and both moments.
An odd number goes through all 32-bit numbers before one comes again."""
_MASK = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class CompactState:
    """Rows of the compact state: (R, O), and (R, ceil(O / 64)) of the exponents."""

    NAMES: ClassVar = (
        *("master_high", "master_low", "exp_avg", "exp_avg_sq"),
        *("exp_avg_exponent", "exp_avg_sq_exponent"),
    )
    """Names of the tensors in a checkpoint, in the order of the fields."""
    NUM_WEIGHTS: ClassVar = 2
    """Number of the first tensors which have the weights."""
    DTYPES: ClassVar = (torch.bfloat16, torch.int8, *([torch.uint8] * 4))
    """Type of each tensor."""
    HAS_SECOND: ClassVar = True
    """Whether there are second moments: else their tensors have no columns."""

    high: Tensor
    """Nearest bfloat16 of each weight, bfloat16."""
    low: Tensor
    """Rest of each weight in 1/256 of the last place of `high`, int8."""
    exp_avg: Tensor
    """Codes of the first moments, uint8: the highest bit is the sign."""
    exp_avg_sq: Tensor
    """Codes of the second moments, uint8."""
    exp_avg_exponent: Tensor
    """Exponent bytes of the first moments' groups, uint8."""
    exp_avg_sq_exponent: Tensor
    """Exponent bytes of the second moments' groups, uint8."""

    @classmethod
    def widths(cls, num_elements: int) -> tuple[int, ...]:
        """Return the length of a row of each tensor, for rows of so many elements."""
        groups, seconds = num_groups(num_elements), int(cls.HAS_SECOND)
        return (*([num_elements] * 3), seconds * num_elements, groups, seconds * groups)

    @classmethod
    def zeros(cls, num_rows: int, num_elements: int) -> CompactState:
        """Return rows of zeros."""
        kinds = zip(cls.widths(num_elements), cls.DTYPES, strict=True)
        return cls(*(torch.zeros(num_rows, width, dtype=dtype) for width, dtype in kinds))

    def rows(self, part: slice | Tensor) -> CompactState:
        """Return the views of a slice of the rows, or copies of the rows of some indices."""
        return type(self)(*(tensor[part] for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of the fields."""
        return (
            *(self.high, self.low, self.exp_avg, self.exp_avg_sq),
            *(self.exp_avg_exponent, self.exp_avg_sq_exponent),
        )

    def weights(self) -> Tensor:
        """Return the weights, exactly: float32 (R, O)."""
        high = self.high.view(torch.int16).to(torch.int32) << 16
        return (high + (self.low.to(torch.int32) << 8)).view(torch.float32)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and moments, exactly: float32 (R, O) each."""
        first = self.exp_avg.to(torch.int64)
        size = _decoded(first & _MOST_FIRST, self._by_element(self.exp_avg_exponent))
        exp_avg = _float(size | (first >> 7 << 31))
        second = self.exp_avg_sq.to(torch.int64)
        exp_avg_sq = _float(_decoded(second, self._by_element(self.exp_avg_sq_exponent)))
        return self.weights(), exp_avg, exp_avg_sq

    def copy_rows(self, rows: Tensor, numbers: Sequence[Tensor]) -> None:
        """Write weights and moments of the rows of some indices to outputs, float32 (n, O)."""
        for tensor, values in zip(self.rows(rows).numbers(), numbers, strict=True):
            values.copy_(tensor)

    def set_weights(self, weights: Tensor) -> None:
        """Take over weights, (R, O) in any dtype, rounded to nearest."""
        if weights.dtype == torch.bfloat16:
            self.high.copy_(weights)
            self.low.zero_()
        else:
            self._set_weights(weights.to(torch.float32), NEAREST[0])

    def set_moments(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Take over moments, float32 (R, O), rounded to nearest."""
        self._set_moments(exp_avg, exp_avg_sq, (NEAREST[1], NEAREST[1]))

    def put(
        self,
        rows: Tensor,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        rounding: Rounding,
    ) -> None:
        """Write weights and moments, float32 (n, O), to the rows of some indices, rounded."""
        own = self.rows(rows)
        own.encode(weight, exp_avg, exp_avg_sq, rounding)
        for tensor, values in zip(self.tensors(), own.tensors(), strict=True):
            tensor[rows] = values

    def encode(
        self, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rounding: Rounding
    ) -> None:
        """Take over weights and moments, rounded.

        Args:
            weight: Weights, float32 (R, O).
            exp_avg: First moments, float32 (R, O).
            exp_avg_sq: Second moments, float32 (R, O), none negative.
            rounding: Bits that decide which way each number is rounded.
        """
        of_weight, *of_moments = rounding.bits
        self._set_weights(weight, of_weight)
        self._set_moments(exp_avg, exp_avg_sq, of_moments)

    def _set_weights(self, weight: Tensor, drawn: Tensor | int) -> None:
        bits = weight.contiguous().view(torch.int32) + drawn
        # Conversions to a smaller integer keep the lowest bits.
        self.high.view(torch.int16).copy_((bits + 0x8000 >> 16).to(torch.int16))
        self.low.copy_((bits >> 8).to(torch.int8))

    def _set_moments(
        self, exp_avg: Tensor, exp_avg_sq: Tensor, drawn: Sequence[Tensor | int]
    ) -> None:
        of_first, of_second = drawn
        first, second = _bits(exp_avg), _bits(exp_avg_sq)
        size = first & 0x7FFFFFFF
        exponent = self._exponents(size, _ROOM_FIRST, self.exp_avg_exponent)
        code = _encoded(size, of_first, exponent, _MOST_FIRST)
        self.exp_avg.copy_(
            torch.maximum(code, _lifted(size, of_first, exponent)) | first >> 31 << 7
        )
        if not self.HAS_SECOND:
            return
        exponent = self._exponents(second, _ROOM_SECOND, self.exp_avg_sq_exponent)
        code = _encoded(second, of_second, exponent, _MOST_SECOND)
        # A second moment that is not 0 never becomes 0: an update divides by its root.
        self.exp_avg_sq.copy_(torch.maximum(code, (second > 0).to(torch.int64)))

    def _by_element(self, exponents: Tensor) -> Tensor:
        """Return the group's exponent byte of each element, (R, O), int64."""
        num_elements = self.exp_avg.shape[1]
        return exponents.to(torch.int64).repeat_interleave(GROUP, 1)[:, :num_elements]

    def _exponents(self, bits: Tensor, room: int, out: Tensor) -> Tensor:
        """Write the exponent bytes of sizes, and return them by element."""
        num_rows, num_elements = bits.shape
        groups = num_groups(num_elements)
        padded = bits.new_zeros(num_rows, groups * GROUP)
        padded[:, :num_elements] = bits
        largest = padded.view(num_rows, groups, GROUP).amax(2) >> 23
        out.copy_((largest - room).clamp_min(0))
        return self._by_element(out)


class FactoredCompactState(CompactState):
    """Compact host state without second moments."""

    __slots__ = ()
    HAS_SECOND: ClassVar = False


@dataclass(frozen=True, slots=True)
class Rounding:
    """Bits that decide which way weights and both moments are rounded.

    Each is an int64 (R, O), or one number for all elements.
    """

    bits: tuple[Tensor | int, Tensor | int, Tensor | int]

    @classmethod
    def nearest(cls) -> Rounding:
        """Return the bits that round to nearest, half away from zero."""
        of_weight, of_moment = NEAREST
        return cls((of_weight, of_moment, of_moment))

    @classmethod
    def drawn(cls, keys: Tensor, first: Tensor, num_elements: int) -> Rounding:
        """Return random bits: the same for an element wherever it is computed.

        Args:
            keys: Keys of each row, int64 (R, 3) from 0 to 2^32 - 1; see `keys_of`.
            first: Number of each row's first element in the whole parameter, int64 (R,).
            num_elements: Elements in a row, O.
        """
        numbers = first.unsqueeze(1) + torch.arange(num_elements)
        drawn = [
            (keys[:, place, None] + (numbers & _MASK) * odd) & _MASK
            for place, odd in enumerate(_ODD)
        ]
        return cls((drawn[0] >> 24, drawn[1] >> 12, drawn[2] >> 12))


def keys_of(seed: int, steps: Tensor) -> Tensor:
    """Return the keys of rows that have taken so many steps: int64 (R, 3), 32 bits each.

    The mixing is that of SplitMix64 (Steele et al., OOPSLA 2014): keys of neighbouring steps have
    nothing in common.

    Args:
        seed: 64-bit number of the run and the parameter.
        steps: Number of Adam steps that each row has taken, int64 (R,).
    """
    known = {count: _mixed(seed, count) for count in set(steps.tolist())}
    return torch.tensor([known[count] for count in steps.tolist()], dtype=torch.int64).view(-1, 3)


def _mixed(seed: int, count: int) -> tuple[int, int, int]:
    whole = 0xFFFFFFFFFFFFFFFF
    state = (seed + count * 0x9E3779B97F4A7C15) & whole
    drawn = []
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & whole
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & whole
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & whole
        drawn.append(mixed ^ mixed >> 31)
    return drawn[0] & _MASK, drawn[0] >> 32, drawn[1] & _MASK


def _bits(values: Tensor) -> Tensor:
    """Return the bits of float32 numbers, int64 from 0 to 2^32 - 1."""
    return values.contiguous().view(torch.int32).to(torch.int64) & _MASK


def _float(bits: Tensor) -> Tensor:
    """Return the float32 numbers of these bits."""
    return _wrapped(bits, 32).view(torch.float32)


def _wrapped(bits: Tensor, width: int) -> Tensor:
    """Return the lowest bits as a signed integer of that width."""
    dtype = {8: torch.int8, 16: torch.int16, 32: torch.int32}[width]
    low = bits & (1 << width) - 1
    return torch.where(low >= 1 << width - 1, low - (1 << width), low).to(dtype)


def _decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the bits of the sizes that codes mean."""
    return torch.where(codes > 0, codes + 8 * exponents << _BITS, 0)


def _encoded(bits: Tensor, drawn: Tensor | int, exponents: Tensor, most: int) -> Tensor:
    """Return the codes of sizes; below 1 where a size is under the group's range."""
    return ((bits + drawn >> _BITS) - 8 * exponents).clamp_max(most).clamp_min(0)


def _lifted(bits: Tensor, drawn: Tensor | int, exponents: Tensor) -> Tensor:
    """Return 1 for sizes under the smallest code's that are rounded up to it, else 0.

    The chance is the size over the smallest code's, so that the mean stays.
    """
    smallest = _float(8 * exponents + 1 << _BITS).double() / (1 << _BITS)
    return (smallest * drawn < _float(bits).double()).to(torch.int64)
