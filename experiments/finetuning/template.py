"""Rows in the form in which TRL masks prompts, by the marks of the tokenizer's chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from experiments.finetuning.rows import Rows
from zenflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Templated:
    """Rows as TRL gets them."""

    rows: Rows
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of `SFTConfig` that say how the rows are masked."""
    told: str
    """Sentence on what is learnt of a row."""


def set_template(tokenizer: Any, path: str | None) -> None:
    """Give a tokenizer the chat template of a file, if there is one."""
    if path is not None:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")


def templated(rows: Rows, tokenizer: Any, *, mask_prompts: bool) -> Templated:
    """Return rows whose prompts TRL masks, and say by what.

    Args:
        rows: The rows.
        tokenizer: The model's, with its chat template.
        mask_prompts: Whether answers alone are learnt.

    Raises:
        ConfigError: The rows need a chat template or an end token, and the tokenizer has none, or
            its template fails on a row.
    """
    if tokenizer.eos_token is None:
        raise ConfigError(
            "the model's tokenizer has no end token (eos_token), so that answers would never end: "
            "set one in its tokenizer_config.json"
        )
    has_template = tokenizer.chat_template is not None
    if rows.form == "text":
        return Templated(rows=rows, told="All of a text is learnt, and an end token behind it.")
    if rows.form == "instruction" and has_template:
        rows = _both(rows, _as_messages)
    is_chat = rows.form == "chat" or isinstance(rows.train[0]["prompt"], list)
    if is_chat and not has_template:
        raise ConfigError(
            f"the model's tokenizer has no chat template, which {rows.called} need: give one with "
            "--chat-template FILE (Jinja), take the model's instruction-tuned version, or write "
            "rows of prompt and completion as text"
        )
    if is_chat:
        _check_template(rows, tokenizer)
    if rows.form == "chat":
        return _chats(rows, tokenizer, mask_prompts=mask_prompts)
    template = "the tokenizer's chat template" if is_chat else "no template: texts as they are"
    return Templated(
        rows=rows,
        arguments={"completion_only_loss": mask_prompts},
        told=f"{'Completions are' if mask_prompts else 'All is'} learnt ({template}).",
    )


def _check_template(rows: Rows, tokenizer: Any) -> None:
    """Let the template read every row, before the weights are loaded.

    Many templates refuse rows by themselves: a system's message, or two questions in a row.
    """
    for row in itertools.chain(rows.train, rows.held_out or ()):
        messages = row["messages"] if rows.form == "chat" else row["prompt"] + row["completion"]
        tools = row.get("tools")
        try:
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                tools=json.loads(tools) if isinstance(tools, str) else tools,
                **(row.get("chat_template_kwargs") or {}),
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the model's chat template can't read a row ({error}), whose roles are {roles} "
                f"and which begins {messages[0].get('content')!r:.60}: change such rows, or give "
                "another template with --chat-template FILE"
            ) from error


def _chats(rows: Rows, tokenizer: Any, *, mask_prompts: bool) -> Templated:
    if not mask_prompts:
        return Templated(rows=rows, told="All of a chat is learnt, prompts too.")
    marks = _marks_of(tokenizer)
    if marks is not None:
        return Templated(
            rows=rows,
            arguments={"assistant_only_loss": True},
            told=f"All answers of a chat are learnt ({marks}).",
        )
    return Templated(
        rows=_both(rows, _as_answers),
        arguments={"completion_only_loss": True},
        told=(
            "The chat template does not mark answers ({% generation %}), so each answer of a chat "
            "is a row of its own: a completion, behind all that was said before."
        ),
    )


def _marks_of(tokenizer: Any) -> str | None:
    """Return where the marks of answers come from; None where there are none."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return "the chat template marks them"
    try:
        get_training_chat_template(tokenizer)
    except ValueError:  # a template that TRL does not know
        return None
    return "marked in TRL's copy of the chat template"


def _both(rows: Rows, change: Any) -> Rows:
    """Return rows of prompts and completions, held out ones too."""
    made = replace(rows, form="prompt", train=change(rows.train))
    return made if rows.held_out is None else replace(made, held_out=change(rows.held_out))


def _as_messages(rows: Any) -> Any:
    def turn(row: Any) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }

    return rows.map(turn)


def _as_answers(rows: Any) -> Any:
    def answers(batch: Any) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {"prompt": [], "completion": []}
        others = [name for name in batch if name != "messages"]
        made |= {name: [] for name in others}
        for index, messages in enumerate(batch["messages"]):
            for place in _places_of_answers(messages):
                made["prompt"].append(messages[:place])
                made["completion"].append([messages[place]])
                for name in others:
                    made[name].append(batch[name][index])
        return made

    return rows.map(answers, batched=True, remove_columns=["messages"])


def _places_of_answers(messages: Any) -> Iterator[int]:
    """Yield the places of answers that something comes before."""
    for place, message in enumerate(messages):
        if place and message["role"] == "assistant":
            yield place
