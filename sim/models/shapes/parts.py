"""Parts: tensors, layers, and the facts of a layer that its work and memory follow from.

Matrices are (O, I), as the gradient of a linear layer is: I is the input channel, the engine's
column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One weight or bias tensor."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    """Share of tokens that compute with it: below 1 for the experts of a mixture."""
    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements."""

    def __post_init__(self) -> None:
        """Count elements once, as plans ask for them millions of times."""
        object.__setattr__(self, "numel", math.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """Widths of what mixes a layer's tokens: attention, or a recurrence.

    Examples:
        >>> Mixer(heads=8, queries=512, keys=128, values=128, outputs=512).is_attention
        True
    """

    heads: int
    """Number of heads that attend; 0 for a recurrence."""
    queries: int
    """Width of queries over all heads."""
    keys: int
    """Width of keys over all groups."""
    values: int
    """Width of values over all groups."""
    outputs: int
    """Width of what the output projection takes, over all heads."""
    between: int = 0
    """Width of what lies between two projections of low rank, or before a gate."""
    window: int | None = None
    """Number of tokens that a token attends to at most; None is all."""
    scored: int = 0
    """Width of scores that choose tokens, over all heads; 0 where all are attended to."""
    state_flop: float = 0.0
    """FLOP of a recurrence for each token, projections left out; 0 for attention."""

    @property
    def is_attention(self) -> bool:
        """Whether tokens attend to one another, at a cost that grows with their number."""
        return self.heads > 0

    @property
    def width(self) -> int:
        """Width of all that goes in and comes out."""
        return self.queries + self.keys + self.values + self.outputs + self.between


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Tensors that are used together, in the order of the forward pass."""

    name: str
    parameters: tuple[Parameter, ...]
    mixer: Mixer | None = None
    """Attention or recurrence; None for a layer that does not mix tokens."""
    inner_width: float = 0.0
    """Width inside the feed-forward, over all experts that a token goes to."""
    is_gated: bool = False
    """Whether its feed-forward has a gate, and RMS norms, as Llama's family."""
    routed: int = 0
    """Number of routed experts that a token goes to."""
    normed_width: float = 0.0
    """Width that its norms have together."""
    numel: int = field(init=False, repr=False, compare=False)
    """Number of elements of all tensors."""

    def __post_init__(self) -> None:
        """Count elements once, as plans ask for them millions of times."""
        object.__setattr__(self, "numel", sum(each.numel for each in self.parameters))

    @property
    def is_inner(self) -> bool:
        """Whether it stands between embedding and head."""
        return self.mixer is not None or self.inner_width > 0

    def without(self, prefixes: tuple[str, ...]) -> Layer:
        """Return the layer without the tensors whose names begin so."""
        return replace(
            self, parameters=tuple(p for p in self.parameters if not p.name.startswith(prefixes))
        )


def vector(name: str, width: int) -> Parameter:
    """Return a tensor of one dimension."""
    return Parameter(name=name, shape=(width,))


def matrix(name: str, out: int, into: int, *, bias: bool = False) -> list[Parameter]:
    """Return the tensors of a linear layer."""
    found = [Parameter(name=f"{name}.weight", shape=(out, into))]
    return [*found, vector(f"{name}.bias", out)] if bias else found


def matrices(names: Iterable[str], out: int, into: int, *, bias: bool = False) -> list[Parameter]:
    """Return the tensors of linear layers of one shape."""
    return [parameter for name in names for parameter in matrix(name, out, into, bias=bias)]


def norm(name: str, width: int, *, bias: bool = True) -> list[Parameter]:
    """Return the tensors of a norm: a layer norm has a bias, an RMS norm has none."""
    found = [vector(f"{name}.weight", width)]
    return [*found, vector(f"{name}.bias", width)] if bias else found
