"""Texts of the two tasks, plain text and chats, and their batches of tokens.

A folder holds the files of `FILES`. Chats are made of GLUE's small tasks: a question about one or
two texts, and an answer. Losses are of the answers alone, as in fine-tuning on instructions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from evidence.studies.language_model.model import Tokenizer
from evidence.studies.sst2.data import made_up, read_rows
from experiments.training.parts.data.batches import IGNORED, Batch
from zenflow.errors import ConfigError

TEXT, CHAT = "plain text", "chats"
TASKS = (TEXT, CHAT)
_PLAIN = "tinyshakespeare/input.txt"
_HELD_OUT_SHARE = 0.1
"""Share of the plain text, its end, that is held out."""
_MOST_TRAIN, _MOST_HELD_OUT = 200, 24
"""Chats of each kind at most. Those with the smallest hash are taken."""
_HELD_OUT_WINDOWS = 16
"""Windows of held-out plain text, evenly spaced."""
_BATCH = 4
"""Rows in a batch of held-out ones."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A kind of chats: a question, and an answer for each label."""

    folder: str
    """Folder of train.tsv and dev.tsv: lines of texts and label."""
    prompt: str
    """Question, with places for the texts."""
    answers: tuple[str | None, str | None]
    """Answer for each label, with places for the texts; None leaves such lines out."""


INSTRUCTIONS = (
    Instruction(
        "glue/rte",
        "Does the second text follow from the first? Answer yes or no.\n\nFirst: {0}\nSecond: {1}",
        ("No", "Yes"),
    ),
    Instruction("glue/rte", "State a fact that follows from this text.\n\n{0}", (None, "{1}")),
    Instruction(
        "glue/cola", "Is this sentence good English? Answer yes or no.\n\n{0}", ("No", "Yes")
    ),
    Instruction(
        "sst2", "Is this review of a film positive or negative?\n\n{0}", ("Negative", "Positive")
    ),
)
"""Kinds of chats that the second task mixes, in equal numbers."""
FILES = (
    _PLAIN,
    *(f"{name}/{part}.tsv" for name in dict.fromkeys(i.folder for i in INSTRUCTIONS)
      for part in ("train", "dev")),
)  # fmt: skip
"""Files that ``--data-dir`` must have."""
Chat = tuple[str, str]
"""Prompt of a user, and the answer that is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts of both tasks, to train on and held out."""

    plain: tuple[str, str]
    chats: tuple[tuple[Chat, ...], tuple[Chat, ...]]
    digests: dict[str, str]
    """The first 16 hex digits of each file's SHA-256; of made-up texts none."""


def read_texts(folder: Path) -> Texts:
    """Return the texts of a folder.

    Raises:
        ConfigError: A file is missing, or has a malformed line.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"--data-dir {folder} must have {', '.join(FILES)}, but has no "
            f"{' and no '.join(missing)}: bring the texts, or check the path"
        )
    whole = (folder / _PLAIN).read_text(encoding="utf-8")
    cut = round((1 - _HELD_OUT_SHARE) * len(whole))
    return Texts(
        plain=(whole[:cut], whole[cut:]),
        chats=(_chats(folder, "train", _MOST_TRAIN), _chats(folder, "dev", _MOST_HELD_OUT)),
        digests={
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] for name in FILES
        },
    )


def _chats(folder: Path, part: str, most: int) -> tuple[Chat, ...]:
    found: list[Chat] = []
    for kind in INSTRUCTIONS:
        rows = read_rows(folder / kind.folder / f"{part}.tsv", most_texts=2)
        own = [
            (kind.prompt.format(*texts.split("\t")), answer.format(*texts.split("\t")))
            for texts, label in rows
            if (answer := kind.answers[label]) is not None
        ]
        found += sorted(own, key=lambda chat: hashlib.sha256(chat[0].encode()).digest())[:most]
    return tuple(found)


def made_up_texts() -> Texts:
    """Return texts for a smoke test, the same at every call."""
    made = made_up(40, 8)
    lines = [text for text, _ in made.train]
    train, held_out = (
        tuple((text, ("no", "yes")[label]) for text, label in part)
        for part in (made.train, made.test)
    )
    return Texts(plain=("\n".join(lines[8:]), "\n".join(lines[:8])), chats=(train, held_out),
                 digests={})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of tokens, each with the number of those that are given and not learnt."""

    rows: Sequence[tuple[list[int], int]]
    pad: int

    def batch(self, places: Sequence[int]) -> Batch:
        """Return rows as a batch: inputs, targets and mask, all (B, longest)."""
        chosen = [self.rows[place] for place in places]
        shape = len(chosen), max(len(tokens) for tokens, _ in chosen) - 1
        inputs, targets = torch.full(shape, self.pad), torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.int64)
        for line, (tokens, given) in enumerate(chosen):
            length = len(tokens) - 1
            inputs[line, :length] = torch.tensor(tokens[:-1])
            targets[line, given - 1 : length] = torch.tensor(tokens[given:])
            mask[line, :length] = 1
        return Batch(inputs=inputs, targets=targets, mask=None if mask.all() else mask)

    def drawn(self, seed: int, step: int, batch_size: int) -> Batch:
        """Return a step's batch, a function of seed and step: each row once in a pass."""
        epoch, place = divmod(step * batch_size, len(self.rows))
        order = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        places = torch.randperm(len(self.rows), generator=order)
        return self.batch(places[place : place + batch_size].tolist())

    def each_once(self) -> Iterator[Batch]:
        """Yield batches that have every row once."""
        for first in range(0, len(self.rows), _BATCH):
            yield self.batch(range(first, min(first + _BATCH, len(self.rows))))


def rows_of(texts: Texts, task: str, tokenizer: Tokenizer, sequence: int) -> tuple[Rows, Rows]:
    """Return a task's rows, to train on and held out.

    Args:
        texts: Texts of both tasks.
        task: Name of the task.
        tokenizer: Way to tokens.
        sequence: Tokens that a row's forward sees. Longer chats are left out.

    Raises:
        ConfigError: No row is left.
    """
    if task == TEXT:
        parts = [_windows(tokenizer.text(text), sequence + 1) for text in texts.plain]
        every = max(1, len(parts[1]) // _HELD_OUT_WINDOWS)
        parts[1] = parts[1][::every][:_HELD_OUT_WINDOWS]
    else:
        made = ([tokenizer.chat(*chat) for chat in part] for part in texts.chats)
        parts = [[row for row in part if len(row[0]) <= sequence + 1] for part in made]
    if not all(parts):
        raise ConfigError(f"{task} of --data-dir must have rows of {sequence} tokens: give more")
    train, held_out = (Rows(part, tokenizer.pad) for part in parts)
    return train, held_out


def _windows(tokens: list[int], length: int) -> list[tuple[list[int], int]]:
    firsts = range(0, len(tokens) - length + 1, length)
    return [(tokens[first : first + length], 1) for first in firsts]
