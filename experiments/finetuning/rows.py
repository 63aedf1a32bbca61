"""Rows to train on: files, folders and data sets, read by `datasets` into three forms.

A chat has ``messages``; a prompt has a ``completion``; a text is plain. Instructions under other
names, such as Alpaca's, become prompts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.finetuning.messages import CHATS, chat_of, messages_of
from experiments.training.parts.data.hub import is_saved_dataset
from experiments.training.parts.data.readable import INSTRUCTION, is_about, rows_called
from experiments.training.settings.paths import check_named
from zenflow.errors import ConfigError

BUILDERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
    ".md": ("text", {"sample_by": "document"}),
}
"""Readers of `datasets` by the ends of files' names; a text file is one row, line breaks kept."""
_HELD_OUT = ("validation", "valid", "dev", "eval", "test")
_BESIDE_CHATS = ("tools", "chat_template_kwargs")
MOST_HELD_OUT, FEWEST_ROWS = 200, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one form."""

    form: str
    """chat, prompt, instruction or text."""
    train: Any
    """`datasets.Dataset` to train on, with the columns of its form and no others."""
    held_out: Any = None
    """`datasets.Dataset` to evaluate on, or None."""

    @property
    def called(self) -> str:
        """Name of the form, as in 'chat rows'."""
        return "texts" if self.form == "text" else f"{self.form} rows"


def read_rows(names: Sequence[str], held_out: str | None, share: float, seed: int) -> Rows:
    """Return the rows that a run trains on and those that it holds out.

    Args:
        names: Files, folders and names of data sets.
        held_out: One more to evaluate on; None takes parts of ``names`` that are called so.
        share: Share of the rows that is held out where there are none of either kind.
        seed: Seed of the choice of these rows.

    Raises:
        ConfigError: Something can't be read, is empty, or has other columns.
    """
    found = [_read(name, "--data") for name in names]
    forms = {rows.form for rows in found}
    if len(forms) > 1:
        told = ", ".join(f"{n}: {r.called}" for n, r in zip(names, found, strict=True))
        raise ConfigError(f"all --data must be of one form, but there are several ({told})")
    train = _joined([rows.train for rows in found])
    parts = [rows.held_out for rows in found if rows.held_out is not None]
    if held_out is not None:
        apart = _read(held_out, "--eval-data")
        if apart.form != found[0].form:
            raise ConfigError(
                f"--eval-data {held_out} has {apart.called}, and --data has {found[0].called}: "
                "give rows of one form"
            )
        parts = [apart.train]
    rows = replace(found[0], train=train, held_out=_joined(parts) if parts else None)
    if parts or not share or len(train) < FEWEST_ROWS:
        return rows
    count = min(MOST_HELD_OUT, max(1, round(share * len(train))))
    split = train.train_test_split(test_size=count, seed=seed)
    return replace(rows, train=split["train"], held_out=split["test"])


def _joined(parts: Sequence[Any]) -> Any:
    from datasets import concatenate_datasets

    if len(parts) == 1:
        return parts[0]
    first = parts[0].features
    try:  # a file's kind decides between types of one meaning
        return concatenate_datasets([p if p.features == first else p.cast(first) for p in parts])
    except ValueError as error:
        raise ConfigError(
            f"the data sets of several --data don't fit together ({_first_line(error)}): give "
            "their columns the same types"
        ) from error


def _read(name: str, flag: str) -> Rows:
    """Return the rows of one file, folder or data set."""
    check_named(name, flag)
    path = Path(name).expanduser()
    if path.is_file():
        parts = {"train": _from_files([path], f"{flag} {name}")}
    elif path.is_dir() and not is_saved_dataset(path):
        parts = _from_folder(path, f"{flag} {name}")
    else:
        parts = _from_hub(name, f"{flag} {name}", saved=path.is_dir())
    if "train" not in parts:
        raise ConfigError(f"{flag} {name} must have a part 'train', but has {', '.join(parts)}")
    made = {part: in_form(rows, f"{flag} {name}") for part, rows in parts.items()}
    found = made.pop("train")
    held_out = next((made[part].train for part in _HELD_OUT if part in made), None)
    return replace(found, held_out=held_out)


def _from_files(paths: Sequence[Path], named: str) -> Any:
    suffixes = {path.suffix.lower() for path in paths}
    unknown = sorted(suffixes - set(BUILDERS))
    if unknown:
        raise ConfigError(
            f"{named} must end in {', '.join(BUILDERS)}, but ends in {unknown[0] or 'nothing'}: "
            "write its rows to one of these"
        )
    if all(path.stat().st_size == 0 for path in paths):
        raise ConfigError(f"{named} is empty: write rows to it")
    builder, how = BUILDERS[next(iter(suffixes))]
    from datasets import load_dataset

    files = [str(path) for path in paths]
    return _loaded(lambda: load_dataset(builder, data_files=files, split="train", **how), named)


def _from_folder(folder: Path, named: str) -> dict[str, Any]:
    """Return a folder's parts: files that are called validation, test and so on, and the rest."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in BUILDERS
        and not is_about(path)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise ConfigError(f"{named} has no file that ends in {', '.join(BUILDERS)}: name one")
    kinds = Counter(BUILDERS[path.suffix.lower()][0] for path in files)
    if len(kinds) > 1:
        told = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        raise ConfigError(
            f"{named} must have files of one kind, but has several ({told}): give them by name"
        )
    parts: dict[str, list[Path]] = {}
    for path in files:
        called = re.fullmatch(rf"({'|'.join(_HELD_OUT)})(-\d+-of-\d+)?", path.stem.lower())
        parts.setdefault(called[1] if called else "train", []).append(path)
    return {part: _from_files(paths, named) for part, paths in parts.items()}


def _from_hub(name: str, named: str, *, saved: bool) -> dict[str, Any]:
    import datasets

    def load() -> Any:
        if saved:
            return datasets.load_from_disk(str(Path(name).expanduser()))
        repository, _, config = name.partition(":")
        return datasets.load_dataset(repository, config or None)

    found = _loaded(load, named)
    return dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}


def _loaded(load: Callable[[], Any], named: str) -> Any:
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except (DatasetsError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        cause = error.__cause__ or error
        raise ConfigError(
            f"{named} can't be read ({type(cause).__name__}: {_first_line(cause)}): mend it, or "
            "give a file, a folder or the name of a data set that `datasets` reads"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def in_form(rows: Any, named: str) -> Rows:
    """Return a data set's rows in their form, each of them looked at.

    Args:
        rows: The data set.
        named: Its flag and name, for messages.

    Raises:
        ConfigError: It is empty, has other columns, or a row lacks a value.
    """
    if not len(rows):
        raise ConfigError(f"{named} is empty: write rows to it")
    names = list(rows.column_names)
    if set(names) & set(CHATS):
        kept = ["messages", *(name for name in _BESIDE_CHATS if name in names)]
        return Rows(form="chat", train=_mapped(rows, _chat, named).select_columns(kept))
    if rows_called(names) == "preference pairs":
        raise ConfigError(
            f"{named} looks like preference pairs (columns {', '.join(names)}): train on them "
            "with TRL's DPOTrainer and our mixin, as docs/guides/trainers.md says"
        )
    pair = next((pair for pair in INSTRUCTION if set(pair) <= set(names)), None)
    if pair is not None:
        form = "prompt" if pair == ("prompt", "completion") else "instruction"
        made = _mapped(rows, lambda row, place: _prompt(row, place, pair, names), named)
        return Rows(form=form, train=made.select_columns(["prompt", "completion"]))
    if "text" in names:
        return Rows(form="text", train=_mapped(rows, _text, named).select_columns(["text"]))
    pairs = "; ".join(" and ".join(pair) for pair in INSTRUCTION[:2])
    raise ConfigError(
        f"{named} must have a column messages, columns {pairs}; instruction and output; or a "
        f"column text, but has {', '.join(names)}: rename its columns"
    )


def _mapped(rows: Any, check: Callable[[Any, str], dict[str, Any]], named: str) -> Any:
    return rows.map(
        lambda row, index: check(row, f"{named}: row {index + 1}"),
        with_indices=True,
        load_from_cache_file=False,  # the functions' names for messages are part of its key
    )


def _chat(row: Any, place: str) -> dict[str, Any]:
    return {"messages": chat_of(row, place)}


def _prompt(row: Any, place: str, pair: tuple[str, str], names: Iterable[str]) -> dict[str, Any]:
    prompt, completion = (row[name] for name in pair)
    for name, value in zip(pair, (prompt, completion), strict=True):
        if not value or not isinstance(value, str | list):
            raise ConfigError(
                f"{place} must have a text in its column {name}, but has {value!r:.80}: write "
                "one, or take the row out"
            )
    if pair[0] == "instruction" and "input" in names and row["input"]:
        prompt += f"\n\n{row['input']}"
    if isinstance(prompt, list) or isinstance(completion, list):
        prompt, completion = (messages_of(part, place) for part in (prompt, completion))
    return {"prompt": prompt, "completion": completion}


def _text(row: Any, place: str) -> dict[str, Any]:
    if not row["text"] or not isinstance(row["text"], str):
        raise ConfigError(
            f"{place} must have a text in its column text, but has {row['text']!r:.80}: write "
            "one, or take the row out"
        )
    return {"text": row["text"]}
