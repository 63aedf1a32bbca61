"""Measured parts of a long record: each is in a file as soon as it is there, and is made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.output.files import write_json
from experiments.output.provenance import provenance
from zenflow.errors import ConfigError


class Parts:
    """A directory of parts that one commit made on one machine."""

    def __init__(self, folder: Path) -> None:
        """Open the directory or make it.

        Raises:
            ConfigError: Its parts were made by another commit or on another machine: one record
                mixes no two.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        own, mark = provenance(), folder / "provenance.json"
        if not mark.is_file():
            write_json(mark, own)
            return
        before = json.loads(mark.read_text(encoding="utf-8"))
        for name in ("commit", "hardware"):
            if before[name] != own[name]:
                raise ConfigError(
                    f"{folder} must hold parts of this {name}, {own[name]}, and holds those of "
                    f"{before[name]}: go on with that one, or name an empty directory"
                )

    def get(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return a part, made now if it was not made before.

        Args:
            name: Of its file, without the ending.
            make: Returns what JSON can hold.
            arguments: Of ``make``.
        """
        path = self._folder / f"{name}.json"
        if not path.is_file():
            write_json(path, {"part": make(*arguments)})
        return json.loads(path.read_text(encoding="utf-8"))["part"]
