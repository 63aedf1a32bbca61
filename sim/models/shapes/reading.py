"""Reading: fields of a config.json, each checked as it is read.

A file may come from anywhere. A field that can't be is noted, and something harmless stands in its
place until all violations are told at once. Fields that nothing here reads may hold anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zenflow.config import raise_violations

Config = Mapping[str, Any]
Switch = bool | tuple[str, bool]
"""A fact of a family, or the field that tells it and what stands where the field is missing."""

_WIDTH, _LENGTH, _LAYERS, _FEW, _EXPERTS = 1 << 20, 1 << 24, 1000, 1 << 16, 1 << 12
_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
         "num_key_value_heads", "num_kv_heads", "n_head_kv", "head_dim", "attention_head_dim",
         "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        _FEW,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
         "num_experts_per_tok", "experts_per_token", "moe_k", "n_shared_experts",
         "num_shared_experts", "moe_num_shared_experts"),
        _EXPERTS,
    ),
    "max_position_embeddings": 1 << 30, "n_positions": _LENGTH,
}  # fmt: skip
"""Largest value of each count that is not `_LENGTH`, some times that of any published model: the
deepest has 1,000 layers (DeepNet, Wang et al. 2022)."""


class Reading:
    """Fields of one file, and what is wrong with them.

    Examples:
        >>> reading = Reading({"hidden_size": 64, "num_hidden_layers": "2"})
        >>> reading.count("hidden_size"), reading.count("num_hidden_layers")
        (64, 1)
        >>> reading.violations
        ["num_hidden_layers must be a whole number from 1 to 1,000, got '2'"]
    """

    def __init__(self, config: Config, usual: Config | None = None) -> None:
        """Read a file's content.

        Args:
            config: Content.
            usual: Values that stand for required fields which the content leaves out; None where
                it may leave none out.
        """
        self.config = config
        self.violations: list[str] = []
        self.assumed: list[str] = []
        """Required fields whose usual value stands, in the order of reading."""
        self.fields: dict[str, str] = {}
        """Kind of each field that was read, as the method is called that reads it."""
        self._unsound: set[str] = set()
        self._usual = usual or {}

    def finish(self, kind: str) -> None:
        """Raise what is wrong, if anything is.

        Raises:
            ConfigError: A field breaks its rule; all violations are listed.
        """
        raise_violations(f"the {kind} config", self.violations)

    def count(self, *names: str, usual: int | None = None, least: int = 1) -> int:
        """Return a whole number.

        Args:
            names: Names that the field may have.
            usual: Number that stands where the field is missing or null; None makes it required.
            least: Smallest number that it may be.
        """
        found = self.maybe(*names, absent=usual, least=least)
        if found is not None:
            return found
        if self._unsound.isdisjoint(names):
            if usual is not None:
                return usual
            if names[0] in self._usual:
                self.assumed.append(names[0])
                return int(self._usual[names[0]])
            self._unsound.update(names)
            self.violations.append(
                f"lacks {' or '.join(names)}, which decides shapes: take the config.json that "
                "belongs to the weights"
            )
        return max(1, least)

    def maybe(self, *names: str, absent: int | None = None, least: int = 1) -> int | None:
        """Return a whole number, or None where it is null or can't be.

        Args:
            names: Names that the field may have.
            absent: Number that stands where none of the names is in the file.
            least: Smallest number that it may be.
        """
        for name in names:
            self.fields.setdefault(name, "count")
        if not any(name in self.config for name in names):
            return absent
        given = {name: self.config[name] for name in names if self.config.get(name) is not None}
        for name, value in given.items():
            most = _MOST.get(name, _LENGTH)
            if not _is_count(value, least, most):
                self._refuse(name, f"a whole number from {least} to {most:,}")
        if not self._unsound.isdisjoint(names):
            self._unsound.update(names)
            return None
        values = list(given.values())
        both = f"{', '.join(given)} are one field under two names, got"
        self.rule(len(set(values)) < 2, f"{both} {', '.join(map(str, values))}")
        return values[0] if values else None

    def switch(self, asked: Switch | str) -> bool:
        """Return a fact of the family, or the boolean field that tells it (false if missing)."""
        if isinstance(asked, bool):
            return asked
        name, usual = (asked, False) if isinstance(asked, str) else asked
        self.fields[name] = "switch"
        value = self.config.get(name, usual)
        if not isinstance(value, bool):
            self._refuse(name, "true or false, without quotes")
            return usual
        return value

    def share(self, name: str, usual: float = 0.0) -> float:
        """Return a probability."""
        self.fields[name] = "share"
        value = self.config.get(name, usual)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
        self._refuse(name, "a number from 0 to 1")
        return usual

    def number(self, name: str) -> float | None:
        """Return a finite number of any sign; None where it is missing or null."""
        self.fields[name] = "number"
        value = self.config.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and abs(value) < math.inf):
            return value
        self._refuse(name, "a number")
        return None

    def section(self, name: str) -> Config | None:
        """Return an object in the file; None where it is missing or null."""
        value = self.config.get(name)
        if value is None or isinstance(value, Mapping):
            return value
        self._refuse(name, "an object")
        return None

    def kinds(self, name: str, known: Collection[str], count: int | None) -> list[str] | None:
        """Return a list of words, one a layer; None where it is missing, null or can't be.

        Args:
            name: Of the field.
            known: Words that may stand there.
            count: Number of layers; None where the list itself tells it.
        """
        self.fields[name] = "kinds"
        value = self.config.get(name)
        if value is None:
            return None
        is_list = isinstance(value, list) and len(value) > 0
        if not is_list or not all(isinstance(word, str) for word in value):
            self._refuse(name, "a list of words, one a layer")
            return None
        strange = next((word for word in value if word not in known), None)
        if strange is not None:
            self._refuse(name, f"made of {', '.join(known)}", got=strange)
            return None
        if count is not None and len(value) != count:
            if self._is_sound("num_hidden_layers"):
                self._refuse(name, f"a list of {count} words, one a layer", got=f"{len(value)}")
            return None
        return list(value)

    def indices(self, name: str) -> list[int] | None:
        """Return the numbers of some layers; None where the field is missing or null.

        Numbers beyond the last layer mean nothing, as in transformers.
        """
        self.fields[name] = "indices"
        value = self.config.get(name)
        if value is None:
            return None
        if isinstance(value, list) and all(_is_count(each, 0, _LAYERS) for each in value):
            return list(value)
        self._refuse(name, "a list of layers' numbers, from 0 on")
        return []

    def rule(self, holds: bool, text: str, *needs: str) -> None:
        """Note a rule between fields that is broken, unless one of them is wrong by itself."""
        if not holds and text not in self.violations and all(map(self._is_sound, needs)):
            self.violations.append(text)  # once, though several layers read a field

    def divides(self, count: int, names: str, whole: int, of: str, why: str = "") -> None:
        """Note that one field is no multiple of another."""
        self.rule(
            whole % count == 0,
            f"{of} must be a multiple of {names}{why}, got {whole} and {count}",
            of, names,
        )  # fmt: skip

    def _is_sound(self, name: str) -> bool:
        return name not in self._unsound

    def _refuse(self, name: str, rule: str, got: str | None = None) -> None:
        if name not in self._unsound:
            value = f"{self.config[name]!r:.60}" if got is None else got
            self.violations.append(f"{name} must be {rule}, got {value}")
        self._unsound.add(name)


def named(words: Sequence[str]) -> str:
    """Return words in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
