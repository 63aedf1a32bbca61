"""Data sets of Hugging Face's ``datasets`` (extra ``hf``), by hub name or saved on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.training.parts.data.readable import rows_called, way_to_train
from experiments.training.parts.data.texts import Documents, LabelledTexts, is_held_out, labelled
from zenflow.errors import ConfigError

_TEXT_COLUMNS = ("text", "sentence", "content", "review", "question")
_OTHER_TEXTS = frozenset(
    {"sentence1", "sentence2", "question1", "question2", "premise", "hypothesis", "passage",
     "question", "sentence", "context", "answer"}
)  # fmt: skip
"""Columns that stand beside a text of which a model is to see both."""
_LABEL_COLUMNS = ("label", "labels", "target", "coarse_label")
_FIRST_ROWS = 100
"""Rows that are looked at to tell what a column holds."""
_EVALUATION_SPLITS = ("validation", "dev", "validation_matched", "test")


def is_saved_dataset(path: Path) -> bool:
    """Return whether a directory was written by ``Dataset.save_to_disk``."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def hub_dataset(
    name: str, *, task: str, text_column: str | None, label_column: str | None
) -> Documents | LabelledTexts:
    """Return a data set's texts, labelled when the task (or a label column) says so.

    Args:
        name: ``owner/name`` or ``name`` on the hub, with ``:config`` behind it where the set has
            several (``glue:sst2``); or a directory that ``save_to_disk`` wrote.
        task: ``lm``, ``classification``, or ``auto``: classification where a label column is.
        text_column: The column of texts; None tries the usual names.
        label_column: The column of classes; None tries the usual names.

    Raises:
        ConfigError: ``datasets`` is missing, the set can't be loaded, a column isn't there, or
            one holds no text.
    """
    splits = _load(name)
    if "train" not in splits:
        raise ConfigError(f"data set {name} must have a split 'train', but has {sorted(splits)}")
    train = splits["train"]
    text = _text_column(name, train, text_column)
    wants_label = task == "classification" or label_column is not None
    label = next((column for column in _LABEL_COLUMNS if column in train.column_names), None)
    if wants_label:
        label = _column(name, train.column_names, label_column, _LABEL_COLUMNS, "--label-column")
    held_out = next((splits[key] for key in _EVALUATION_SPLITS if key in splits), None)
    if label is None or task == "lm":
        return _documents(name, train, held_out, text)
    return _labelled(name, train, held_out, text, label)


def _load(name: str) -> Mapping[str, Any]:
    try:
        import datasets  # an optional extra, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"--data {name} is neither a file nor a directory here, and a data set's name needs "
            "the extra hf: pip install 'zenflow-offload[hf]', or check the path"
        ) from error
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
        else:
            repository, _, config = name.partition(":")
            loaded = datasets.load_dataset(repository, config or None)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"data set {name} can't be loaded ({type(error).__name__}: {error}): check the name, "
            "the network, or save it to a directory with save_to_disk and give that"
        ) from error
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _column(
    dataset: str, present: Sequence[str], asked: str | None, usual: Sequence[str], flag: str
) -> str:
    if asked is not None and asked in present:
        return asked
    found = next((name for name in usual if name in present), None)
    if asked is not None or found is None:
        raise ConfigError(
            f"data set {dataset} has no column {asked or ' or '.join(usual)}; its columns are "
            f"{', '.join(present)}: choose with {flag}"
        )
    return found


def _text_column(dataset: str, train: Any, asked: str | None) -> str:
    """Return the column of texts: the one asked for, or the only one with a usual name."""
    present = train.column_names
    called = rows_called(present)
    if asked is None and "text" not in present and called != "rows of a table":
        raise ConfigError(_rows_refused(dataset, present))
    found = _column(dataset, present, asked, _TEXT_COLUMNS, "--text-column")
    if asked is None and found != "text":
        others = [name for name in present if name in _OTHER_TEXTS and name != found]
        if others:
            raise ConfigError(
                f"data set {dataset} has several columns of text ({', '.join((found, *others))}), "
                "and one is read: choose it with --text-column, or join them in a column of "
                "their own and save_to_disk that"
            )
    values = train.select_columns([found])[:_FIRST_ROWS][found]
    first = next((value for value in values if value is not None), "")
    if not isinstance(first, str):
        if called != "rows of a table" and isinstance(first, list | dict):
            raise ConfigError(_rows_refused(dataset, present))
        raise ConfigError(
            f"column {found} of data set {dataset} holds {type(first).__name__}s, not texts: "
            f"choose another with --text-column; there are {', '.join(present)}"
        )
    return found


def _rows_refused(dataset: str, columns: Sequence[str]) -> str:
    """Return the way to go for a set of chat rows, instructions or preferences."""
    if Path(dataset).is_dir():
        part = '["train"]' if (Path(dataset) / "dataset_dict.json").is_file() else ""
        loaded = f'load_from_disk("{dataset}"){part}'
    else:
        words = ", ".join(f'"{word}"' for word in dataset.split(":", 1))
        loaded = f'load_dataset({words}, split="train")'
    return (
        f"data set {dataset} looks like {rows_called(columns)} (columns {', '.join(columns)})"
        + way_to_train(columns, loaded)
    )


def _documents(name: str, train: Any, held_out: Any, column: str) -> Documents:
    texts = [str(text) for text in train[column] if text]
    if held_out is not None:
        evaluation = [str(text) for text in held_out[column] if text]
    else:
        evaluation = [text for text in texts if is_held_out(text)]
        texts = [text for text in texts if not is_held_out(text)]
    if not texts or not evaluation:
        raise ConfigError(f"data set {name} has no text in column {column}: try --text-column")
    return Documents(name=name, train=tuple(texts), held_out=tuple(evaluation))


def _labelled(
    name: str, train: Any, held_out: Any, text_column: str, label_column: str
) -> LabelledTexts:
    names = getattr(train.features[label_column], "names", None)

    def rows(split: Any) -> list[tuple[str, str]]:
        pairs = zip(split[text_column], split[label_column], strict=True)
        # A class of -1 marks a hidden test label: there is nothing to learn or check from it.
        return [
            (str(text), names[label] if names else str(label))
            for text, label in pairs
            if label is not None and label != -1
        ]

    training = rows(train)
    evaluation = rows(held_out) if held_out is not None else []
    if not evaluation:
        evaluation = [row for row in training if is_held_out(row[0])]
        training = [row for row in training if not is_held_out(row[0])]
    return labelled(name, training, evaluation)
