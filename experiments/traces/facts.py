"""Facts of a trace: the model, its batch, the machine and the commit, in its metadata.

Importing this loads neither torch nor matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """Facts of a trace's steps; None where nobody said."""

    strategy: str | None = None
    model: str | None = None
    num_params: int | None = None
    """Parameters that are trained: models of one shape take one time, whatever they are called."""
    batch_size: int | None = None
    """Sequences of a micro-batch on one device."""
    sequence: int | None = None
    """Tokens of a sequence."""
    grad_accum: int | None = None
    """Micro-batches of a step."""
    machine: str | None = None
    commit: str | None = None

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> TraceFacts:
        """Return the facts in a trace's metadata; values of another type count as not said."""
        kinds = {field.name: int if "int" in str(field.type) else str for field in fields(cls)}
        found = {name: metadata.get(name) for name in kinds}
        return cls(**{n: v for n, v in found.items() if isinstance(v, kinds[n])})  # type: ignore[arg-type]

    def to_metadata(self) -> dict[str, Any]:
        """Return the known facts, JSON-ready."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def batch(self) -> str:
        """Tokens of a step in words; empty where they are not known."""
        if self.batch_size is None or self.sequence is None:
            return ""
        times = f"{self.grad_accum} x " if (self.grad_accum or 1) > 1 else ""
        return f"{times}{self.batch_size} x {self.sequence} tokens"

    @property
    def size(self) -> str:
        """The model by its size; empty where that is not known."""
        return "" if self.num_params is None else f"{self.num_params / 1e6:,.4g}M parameters"

    def __str__(self) -> str:
        """Return the known facts in a line; empty where none is known."""
        model = f"{self.model} ({self.size})" if self.model and self.size else self.model or ""
        parts = [self.strategy, model, self.batch, self.machine]
        commit = [] if self.commit is None else [f"commit {self.commit}"]
        return ", ".join([part for part in parts if part] + commit)


def differences(a: TraceFacts, b: TraceFacts) -> list[str]:
    """Return in sentences what makes the steps of A and B different work."""
    if a.num_params is None or b.num_params is None:
        silent = [mark for mark, side in (("A", a), ("B", b)) if side.num_params is None]
        return [f"nothing says which model {' and '.join(silent)} is of: see that both are of one"]
    found = []
    if a.num_params != b.num_params:
        found.append(
            f"A is of {a.model} ({a.size}) and B of {b.model} ({b.size}): two models' times say "
            "nothing of two settings or machines"
        )
    if a.batch != b.batch:
        found.append(
            f"a step of A is {a.batch or 'of unknown length'} and one of B "
            f"{b.batch or 'of unknown length'}: compare tokens a second, not steps"
        )
    return found
