"""Data that is refused because it is no text, and the remedy for each kind.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.training.parts.data.file_kinds import FileKind, head_lines, is_header, not_text
from experiments.training.parts.data.text_files import FolderFiles
from zenflow.errors import ConfigError

_CHAT = frozenset({"messages", "conversations", "conversation", "dialog", "dialogue", "turns"})
_PREFERENCE = frozenset({"chosen", "rejected"})
INSTRUCTION = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"),
    ("instruction", "response"), ("question", "answer"), ("question", "answers"),
    ("query", "response"), ("input", "output"),
)  # fmt: skip
"""Names of columns that ask and answer, the usual ones first."""
_ABOUT = frozenset({"readme", "license", "licence", "notice", "citation"})
"""Names of files that tell of a data set and are none themselves."""
_LABELS = frozenset({"label", "labels", "class", "category", "target", "sentiment"})
_FEW_LINES = 20
"""Lines of a TSV from which on nearly as many labels as lines are no labels."""


def is_about(path: Path) -> bool:
    """Return whether a file tells of a data set, by its name, and is no part of one."""
    return path.stem.lower() in _ABOUT


def check_readable(path: Path, flag: str, *, is_labelled: bool) -> None:
    """Refuse a path that holds no text, by its names and first bytes alone.

    Args:
        path: A file or a directory that is there.
        flag: What it was given with.
        is_labelled: Whether it is to be read as lines of text, tab, label.

    Raises:
        ConfigError: It holds rows, archives or documents, or is a table of other columns.
    """
    if path.is_dir() and is_labelled:
        check_labelled(path / "train.tsv", flag)
    elif path.is_dir():
        _check_folder(path, flag)
    else:
        found = not_text(path, is_labelled=is_labelled)
        if found is not None:
            raise ConfigError(_refusal(f"{flag} {path}", found, str(path)))
        if is_labelled:
            check_labelled(path, flag)


def _check_folder(path: Path, flag: str) -> None:
    """Refuse a directory of rows, archives or documents that has no text of its own."""
    files = FolderFiles.below(path)
    if not all(is_about(file) for file in files.texts):
        return
    for file, _ in files.passed:
        found = not_text(file)
        if found is not None:
            what = f"{flag} {path} has no plain text of its own, and {file.relative_to(path)}"
            raise ConfigError(_refusal(what, found, str(file)))


def _refusal(what: str, found: FileKind, path: str) -> str:
    """Return why a file is refused, and the way to go."""
    if found.builder is None:
        remedy = "unpack it first" if found.is_packed else "write its text to a .txt file"
        return (
            f"{what} is {found.words}, and `zenflow train` takes plain text: {remedy}, and give "
            "the file or folder that comes of it"
        )
    loaded = f'load_dataset("{found.builder}", data_files="{path}", split="train")'
    columns = f" with {', '.join(found.columns[:6])}" if found.columns else ""
    looks = f"{what} looks like {rows_called(found.columns)} ({found.words}{columns})"
    return looks + way_to_train(found.columns, loaded)


def rows_called(columns: Iterable[str]) -> str:
    """Return the name of rows with these columns.

    >>> rows_called(["messages"]), rows_called(["instruction", "input", "output"])
    ('chat rows', 'instruction rows')
    >>> rows_called(["text", "label"])
    'rows of a table'
    """
    names = {column.strip().lower() for column in columns}
    if names & _CHAT:
        return "chat rows"
    if names >= _PREFERENCE:
        return "preference pairs"
    if any(names >= set(pair) for pair in INSTRUCTION):
        return "instruction rows"
    return "rows of a table"


def way_to_train(columns: Sequence[str], loaded: str) -> str:
    """Return why rows are refused, how to train on them, and how they become text.

    Args:
        columns: Names of their columns, as far as they are known.
        loaded: Code that loads them.
    """
    called, names = rows_called(columns), {name.strip().lower() for name in columns}
    trainer = "DPO" if called == "preference pairs" else "SFT"
    if called == "rows of a table":
        column = next((name for name in ("text", "content", "sentence") if name in names), "NAME")
        other = (
            f'For one column of plain text: {loaded}.save_to_disk("texts"), then --data texts '
            f"--text-column {column}; for classification, lines of text, tab, label in a .tsv"
        )
    else:
        other = (
            "Or write to a .txt file what the model is to read, such as "
            'tokenizer.apply_chat_template(row["messages"], tokenize=False)'
        )
    command = "" if trainer == "DPO" else "`zenflow finetune --data` (docs/guides/finetune.md) or "
    return (
        ". `zenflow train` takes plain text: it would learn the names of columns and what stands "
        f"between them, and knows no chat template. Train on such rows with {command}TRL's "
        f"{trainer}Trainer (docs/guides/trainers.md; examples/finetune_chat.py is a script):\n\n"
        f"    class ZenFlow{trainer}Trainer(ZenFlowTrainerMixin, {trainer}Trainer): pass\n"
        f"    rows = {loaded}{_renamed(called, names)}\n"
        f"    ZenFlow{trainer}Trainer(model=MODEL, args={trainer}Config(OUT), "
        f"train_dataset=rows).train()\n\n{other}"
    )


def _renamed(called: str, names: Iterable[str]) -> str:
    """Return the code that gives instruction rows the names that TRL knows."""
    if called != "instruction rows" or {"prompt", "completion"} <= set(names):
        return ""
    asked, answer = next(pair for pair in INSTRUCTION if set(names) >= set(pair))
    prompt = f"row['{asked}']"
    if asked == "instruction" and "input" in names:
        prompt += " + '\\n' + (row['input'] or '')"
    return f".map(lambda row: {{'prompt': {prompt}, 'completion': row['{answer}']}})"


def check_labelled(path: Path, flag: str) -> None:
    """Refuse a TSV whose lines are not one text, tab, label, by its first lines.

    Raises:
        ConfigError: Most lines have more columns, or what stands last is no label.
    """
    try:
        lines = [line for line in head_lines(path) if line.strip()]
    except OSError:
        return  # who reads it says so
    rows = [line.split("\t") for line in lines]
    if not rows:
        return
    header = [name.strip() for name in rows[0]] if is_header(rows[0]) else []
    many = [row for row in rows if len(row) > 2]
    if len(header) > 2 or 2 * len(many) > len(rows):
        raise ConfigError(_too_many(path, flag, header, many[0]))
    if header and header[-1].lower() not in _LABELS:
        raise ConfigError(_no_label(path, flag, f"its columns are {', '.join(header)}"))
    labels = {row[-1].strip() for row in rows if len(row) > 1}
    if len(rows) >= _FEW_LINES and 2 * len(labels) > len(rows):
        told = f"the last column has {len(labels)} values in its first {len(rows)} lines"
        raise ConfigError(_no_label(path, flag, told))


def is_label_header(label: str) -> bool:
    """Return whether what stands behind a first line's last tab names the column of labels."""
    return label.strip().lower() in _LABELS


def _too_many(path: Path, flag: str, header: Sequence[str], row: Sequence[str]) -> str:
    count = len(row)
    told = f"the columns {', '.join(header)}" if header else f"{count} columns"
    example = ""
    if not header or is_label_header(header[-1]):
        awk = f'{{print ${count - 2} " " ${count - 1}, ${count}}}'
        example = f", such as by awk -F'\\t' -v OFS='\\t' '{awk}'"
    return (
        f"{flag} {path} has {told}, and classification takes two: a text and its label. Two "
        "sentences would be read as one, with a tab in it. Keep one text and the label, or join "
        f"the sentences{example}. For pairs as such use transformers' Trainer, as "
        "docs/guides/trainers.md has it"
    )


def _no_label(path: Path, flag: str, told: str) -> str:
    return (
        f"{flag} {path}: each line of a TSV must be a text, a tab and its label, but {told}: put "
        "the label last. For prompts and answers use TRL's SFTTrainer with ZenFlowTrainerMixin "
        "(docs/guides/trainers.md); --task lm learns the lines as they are"
    )
