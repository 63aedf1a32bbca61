"""A row as text, with what is masked between marks; and a model's answer to its beginning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

IGNORED = -100
OPEN, CLOSE = "⟦", "⟧"
"""Marks around what no loss is of."""
_LONGEST_PIECE = 600
_FEWEST_PROMPT, _SHARE_OF_TEXT = 8, 4


def marked(tokenizer: Any, ids: Sequence[int], labels: Sequence[int]) -> str:
    """Return a row's text, with what no loss is of between `OPEN` and `CLOSE`.

    Args:
        tokenizer: The row's.
        ids: Tokens of the row, (T,).
        labels: Tokens to learn, (T,), `IGNORED` where none is.
    """
    learnt = sum(label != IGNORED for label in labels)
    head = f"First row, as the model reads it: {len(ids)} tokens, {learnt} of them learnt"
    head += f", the others between {OPEN} {CLOSE}:" if learnt < len(ids) else ":"
    pieces = (
        f"{OPEN}{_shortened(text)}{CLOSE}" if is_masked else _shortened(text)
        for text, is_masked in _pieces(tokenizer, ids, labels)
    )
    return f"{head}\n{''.join(pieces)}"


def _pieces(
    tokenizer: Any, ids: Sequence[int], labels: Sequence[int]
) -> Iterator[tuple[str, bool]]:
    """Yield pieces of text, and whether each is masked.

    Texts are differences of longer ones: tokens alone lose their spaces.
    """
    end, before = 0, ""
    for is_masked, group in itertools.groupby(label == IGNORED for label in labels):
        end += len(list(group))
        until = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        yield until[len(before) :], is_masked
        before = until


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_PIECE:
        return text
    half = _LONGEST_PIECE // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def beginning(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """Return the tokens of a row that an answer goes on from: its prompt, or a text's first.

    >>> beginning([5, 6, 7, 8], [-100, -100, 7, 8])
    [5, 6]
    >>> len(beginning(range(100), range(100)))
    25
    """
    prompt = sum(1 for _ in itertools.takewhile(lambda label: label == IGNORED, labels))
    return list(ids[: prompt or max(_FEWEST_PROMPT, len(ids) // _SHARE_OF_TEXT)])


def sample(model: Any, tokenizer: Any, prompt: Sequence[int], most: int, device: Any) -> str:
    """Return a model's likeliest answer to a prompt, as text.

    Args:
        model: The model, which shows the weights to be looked at.
        tokenizer: Its tokenizer.
        prompt: Tokens, (T,).
        most: Largest number of tokens of the answer.
        device: Where the model computes.
    """
    import torch
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
    )
    was_training = model.training
    model.eval()
    try:
        given = torch.tensor([list(prompt)], device=device)
        with torch.no_grad():
            made = model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), generation_config=how
            )
    finally:
        model.train(was_training)
    answer: str = tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)
    return answer
