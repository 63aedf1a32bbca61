"""Rules, tasks, rates and protocol of the study, and the order of its cells."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from evidence.studies.language_model.data import (
    CHAT,
    FILES,
    TASKS,
    TEXT,
    Texts,
    made_up_texts,
    read_texts,
)
from evidence.studies.language_model.model import PACKAGED, locate, weights_digest
from experiments.lab.study import Cell, Data, NeedsInputError, Scope
from experiments.training.settings.training import TrainSettings

ADAMW, DEFAULT, COMPACT = "AdamW", "zenflow, S = 4", "zenflow, compact state"
SHORT_ADAMW, SHORT = "AdamW, bfloat16 weights", "zenflow, bfloat16 weights"
LONG, PUBLISHED = "zenflow, S = 16", "published rule"
ALL_LATE, ALL_LATE_COMPACT = "zenflow, k = 0", "zenflow, k = 0, compact state"
SMALL_LINK = "zenflow, 8-bit gradients"
SMALL_BOTH = "zenflow, compact state, 8-bit gradients"
RATE, OTHER_RATES = 3e-5, (1e-5, 1e-4)
"""Peak learning rate of most runs, and the others."""
PROTOCOL = TrainSettings(
    strategy="zenflow",
    task="lm",
    sequence=128,
    batch_size=2,
    steps=40,
    lr=RATE,
    betas=(0.9, 0.999),
    weight_decay=0.01,
    schedule="linear",
    warmup=0.1,
    max_grad_norm=1.0,
    timeline_steps=0,
)
"""Protocol of every run. A run takes two to four minutes of one core."""
SMOKE = replace(
    PROTOCOL, steps=6, sequence=48, lr=1e-3, device="cpu", knobs={"min_split_elements": 256}
)
_SHARED = (
    "steps", "sequence", "batch_size", "schedule", "warmup", "max_grad_norm", "betas", "eps",
    "weight_decay",
)  # fmt: skip
_CHAT_ROWS = 2
"""Rows of chats for each row of plain text: they are shorter."""
_FEW_SEEDS = 3
"""Seeds of every run but those of the claims on chats, whose losses scatter more than on text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An optimizer that trains the model."""

    name: str
    kind: Literal["adamw", "adamw8", "muon", "engine"] = "engine"
    """Torch's AdamW, torchao's with moments of 8 bits, torch's Muon on matrices beside AdamW, or
    the engine."""
    preset: str = "zenflow"
    """Preset of the engine."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that differ from the preset's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the weights that forward sees."""
    is_peer: bool = False
    """Whether others train so: it is drawn beside the engine's own rules."""

    @property
    def is_there(self) -> bool:
        """Whether the packages that it needs are installed."""
        return self.kind != "adamw8" or importlib.util.find_spec("torchao") is not None

    @property
    def beside(self) -> str:
        """Name of the rule whose loss this one's is compared with."""
        return ADAMW if self.dtype == "float32" else SHORT_ADAMW


CLAIMED = (DEFAULT, COMPACT)
"""Rules that are to keep AdamW's held-out loss."""
FEW_BYTES = (COMPACT, SMALL_LINK, SMALL_BOTH)
"""Rules that differ from `DEFAULT` in nothing but the bytes of states, gradients, or both."""
RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(name=ADAMW, kind="adamw"),
        Rule(name=DEFAULT),
        Rule(name=COMPACT, knobs={"host_state": "compact"}),
        Rule(name=LONG, knobs={"update_interval": 16}),
        Rule(name=PUBLISHED, preset="zenflow_paper", is_peer=True),
        Rule(name=ALL_LATE, knobs={"topk_ratio": 0.0}),
        Rule(name=ALL_LATE_COMPACT, knobs={"topk_ratio": 0.0, "host_state": "compact"}),
        Rule(name=SMALL_LINK, knobs={"gradient_link": "e4m3"}),
        Rule(name=SMALL_BOTH, knobs={"host_state": "compact", "gradient_link": "e4m3"}),
        Rule(name="delayed updates", preset="delayed", is_peer=True),
        Rule(name="Muon", kind="muon", is_peer=True),
        Rule(name="8-bit AdamW (torchao)", kind="adamw8", is_peer=True),
        Rule(
            name="AdamW, compact state (our 8 bits)",
            preset="zero_offload",
            knobs={"host_state": "compact"},
        ),
        Rule(name=SHORT_ADAMW, preset="on_device", dtype="bfloat16"),
        Rule(name=SHORT, dtype="bfloat16"),
    )
}
"""Every rule by its name, the most telling first.

DeepSpeed's ZenFlow is the published rule, and ZeRO-Offload's one-step delay the delayed updates.
torch has no AdamW of 8 bits. torchao's has runs where that is installed; our own compact state,
without any late update, shows what rounding alone does.
"""
_CLAIMS = (ADAMW, *CLAIMED)
_SEEDED = (SMALL_LINK, SMALL_BOTH, LONG, PUBLISHED, ALL_LATE, ALL_LATE_COMPACT)
_OTHERS = tuple(name for name in RULES if name not in (*_CLAIMS, *_SEEDED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model, texts and protocol that all runs share."""

    texts: Texts
    """Texts of both tasks."""
    protocol: TrainSettings
    """Settings of every run but for rule, rate and seed."""
    path: Path | None
    """Place of the model; None is a tiny one of random weights."""
    header: Data
    """Everything that decides all runs."""

    def cells(self, seeds: Sequence[int], *, smoke: bool) -> list[Cell]:
        """Return every run: those of the claims first, then one seed of all others, then more."""
        few, first, later = seeds[:_FEW_SEEDS], seeds[:1], seeds[1:_FEW_SEEDS]
        rate = self.protocol.lr
        blocks = (
            (TASKS, few, (rate,), _CLAIMS),
            (TASKS, first, (rate,), (*_SEEDED, *_OTHERS)),
            ((CHAT,), seeds[_FEW_SEEDS:], (rate,), _CLAIMS),
            (TASKS, first, OTHER_RATES, _CLAIMS),
            (TASKS, later, (rate,), _SEEDED),
            (TASKS, later, OTHER_RATES, _CLAIMS),
        )
        cells = [
            self._cell(task, RULES[name], lr, seed)
            for tasks, own, rates, names in blocks
            for seed in own
            for lr in rates
            for task in tasks
            for name in names
            if RULES[name].is_there
        ]
        return [cell for cell in cells if cell.settings["lr"] == rate] if smoke else cells

    def _cell(self, task: str, rule: Rule, lr: float, seed: int) -> Cell:
        protocol = self.protocol
        training = replace(
            protocol,
            strategy=rule.preset,
            knobs={**protocol.knobs, **rule.knobs},
            lr=lr,
            seed=seed,
            dtype=rule.dtype,
            batch_size=protocol.batch_size * (1 if task == TEXT else _CHAT_ROWS),
        )
        settings = {"task": task, "rule": rule.name, "lr": lr, "seed": seed}
        return Cell(settings=settings, work=(training, task, rule))


@lru_cache(maxsize=2)
def subject(scope: Scope) -> Subject:
    """Return the model, texts and protocol of a scope.

    Raises:
        NeedsInputError: It names no folder.
        ConfigError: The texts or the model can't be read.
    """
    if scope.smoke:
        texts, path, protocol = made_up_texts(), None, SMOKE
        model: Data = {"model": "a tiny Llama of random weights", "model_sha256": None}
    elif scope.data_dir is None:
        raise NeedsInputError(
            f"this study trains on texts: give --data-dir FOLDER, which has {', '.join(FILES)} "
            "(lines of one or two texts and 0 or 1, tabs between them), or try --smoke, which "
            "needs none"
        )
    else:
        texts, protocol = read_texts(scope.data_dir.expanduser()), PROTOCOL
        name = scope.model or PACKAGED
        path = locate(name)
        model = {
            "model": name if name.startswith("package:") else path.name,
            "model_sha256": weights_digest(path),
        }
    shared = protocol.to_dict()
    header = {**model, "files_sha256": texts.digests, "chat_rows": _CHAT_ROWS,
              **{name: shared[name] for name in _SHARED}}  # fmt: skip
    return Subject(texts=texts, protocol=protocol, path=path, header=header)
