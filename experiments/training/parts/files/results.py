"""Files that a run leaves in its folder, told from the files of others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from experiments.training.parts.files.runlock import LOCK
from zenflow.config import PRESETS

_CONFIG = "config.json"
_FILES = (
    _CONFIG, "steps.jsonl", "summary.json", "trace.json", "timeline.png", "compare.json",
    "compare.png", "decisions.jsonl", "tuning.png",
)  # fmt: skip
_FOLDERS = ("checkpoint", "model")
_RUNS_OF_A_COMPARISON = ("start", *PRESETS, "auto", "zen-auto")
_DRAFT = re.compile(r"\.(?P<name>.+)\.\d+(\.draft)?")
"""A file that was being replaced when its process was killed."""
_DRAFT_OF_A_MODEL = ".model.writing"


def others_in(folder: Path) -> list[Path]:
    """Return the files of a directory that are no part of a run or a comparison, nor its lock."""
    mine = {*_results_in(folder), folder / LOCK}
    return [path for path in folder.iterdir() if path not in mine]


def remove_results(folder: Path) -> None:
    """Remove a run's or a comparison's results from a directory, and nothing else in it."""
    # By config.json a run is known: it goes last, so that a removal that ends early can go on.
    for path in sorted(_results_in(folder), key=lambda path: path.name == _CONFIG):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _results_in(folder: Path) -> list[Path]:
    is_run = (folder / _CONFIG).is_file()
    return [path for path in folder.iterdir() if _is_result(path, is_run=is_run)]


def _is_result(path: Path, *, is_run: bool) -> bool:
    """Whether a run has left this in a folder that is a run's, or that it had just begun with."""
    name = path.name
    if path.is_dir():
        if name in _RUNS_OF_A_COMPARISON:
            return is_run and not others_in(path)
        return name == _DRAFT_OF_A_MODEL or (is_run and name in _FOLDERS)
    draft = _DRAFT.fullmatch(name)
    if draft is not None:
        return draft["name"] in _FILES
    return name in _FILES if is_run else _is_begun(path)


def _is_begun(path: Path) -> bool:
    """Whether a file is a log without a step, as it is before a run has its config.json."""
    if path.name not in ("steps.jsonl", "decisions.jsonl"):
        return False
    return path.read_bytes().count(b"\n") <= (path.name == "decisions.jsonl")
