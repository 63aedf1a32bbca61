"""Messages of a chat: the forms that people write them in, and the one that templates read."""

from __future__ import annotations

from typing import Any

from zenflow.errors import ConfigError

CHATS = ("messages", "conversations")
"""Columns of chats; the second is ShareGPT's."""
_ROLES = {"human": "user", "gpt": "assistant"}


def chat_of(row: Any, place: str) -> list[dict[str, Any]]:
    """Return the messages of a row, each with a role and a content.

    Args:
        row: Row with one of the columns `CHATS`.
        place: Name of the row in errors.

    Raises:
        ConfigError: There are none, one lacks something, or no answer is among them.
    """
    found = row.get("messages") or [_renamed(said) for said in row.get("conversations") or ()]
    messages = messages_of(found, place)
    if not any(message["role"] == "assistant" for message in messages[1:]):
        raise ConfigError(
            f"{place} has no answer of role assistant behind a first message: nothing could be "
            "learnt from it, take it out"
        )
    return messages


def messages_of(found: Any, place: str) -> list[dict[str, Any]]:
    """Return messages whose contents are texts; a list of texts becomes one.

    A message without content stays as it is where it holds something else, such as tool calls.

    Args:
        found: The messages.
        place: Name of the row in errors.

    Raises:
        ConfigError: They are no messages, or a content is no text.
    """
    is_chat = isinstance(found, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in found
    )
    if not found or not is_chat:
        raise ConfigError(
            f"{place} must have messages, each with a role and content, but has {found!r:.80}"
        )
    return [_with_text(message, f"{place}, message {n}") for n, message in enumerate(found, 1)]


def _renamed(said: Any) -> Any:
    """Return a message of ShareGPT's form in the usual one."""
    if not isinstance(said, dict) or "from" not in said:
        return said
    return {"role": _ROLES.get(said["from"], said["from"]), "content": said.get("value")}


def _with_text(message: dict[str, Any], place: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if any(value for name, value in message.items() if name != "role"):
            return message
    elif isinstance(content, list) and all(map(_is_text, content)):
        return {**message, "content": "".join(part["text"] for part in content)}
    raise ConfigError(
        f"{place} must have a text as content, or a list of parts of type text, but has "
        f"{content!r:.80}: write one, or take the row out"
    )


def _is_text(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)
