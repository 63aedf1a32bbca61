"""Lines on the data for the user, before training begins."""

from __future__ import annotations

import json

from experiments.training.parts.data.batches import TrainingData
from experiments.training.parts.data.tokens import TextTokenizer

_MOST_CHARACTERS = 200
"""Characters of the first row that are shown."""


def told_of_data(data: TrainingData, tokenizer: TextTokenizer) -> str:
    """Return a line for each note on how texts were read, and the first row."""
    return "\n".join((*(f"data: {note}" for note in data.notes), first_row(data, tokenizer)))


def first_row(data: TrainingData, tokenizer: TextTokenizer) -> str:
    """Return the first row of training as the model sees it, in a line: its tokens, decoded."""
    batch = data.train.batch(0)
    tokens = batch.inputs[0] if batch.mask is None else batch.inputs[0][batch.mask[0].bool()]
    text = tokenizer.decode(tokens.tolist())
    words = json.dumps(text[:_MOST_CHARACTERS], ensure_ascii=False)
    cut = " ..." if len(text) > _MOST_CHARACTERS else ""
    label = f", class {batch.targets[0].item()}" if batch.targets.ndim == 1 else ""
    return f"first row as the model sees it ({len(tokens)} tokens{label}): {words}{cut}"
