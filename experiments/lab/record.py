"""Records of studies: a folder with record.json, rows.jsonl, README.md and picture.png, always.

A folder appears whole, by a rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.lab.finding import Finding
from experiments.lab.page import PICTURE, page
from experiments.lab.study import Data, Row, Study, as_json
from experiments.output.files import strict, write_json, write_text
from experiments.output.provenance import RESULTS
from zenflow.errors import ConfigError
from zenflow.provenance import provenance

RECORD, ROWS, README = "record.json", "rows.jsonl", "README.md"
FORMAT = 2
COMMIT = "commit"
"""Key of rows that another commit added to a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A study's rows with where they come from."""

    folder: Path
    """Folder of the record."""
    header: Mapping[str, Any]
    """Content of record.json, parsed."""
    rows: Sequence[Row]
    """Rows in the order of the cells, then those of other records."""
    findings: tuple[Finding, ...]
    """Findings as they were written."""

    @property
    def name(self) -> str:
        """Key of the study."""
        return str(self.header["name"])

    @property
    def config(self) -> Data:
        """Settings that all rows share."""
        return dict(self.header["config"])

    @property
    def commit(self) -> str | None:
        """Commit of the program that made it."""
        found: str | None = self.header["commit"]
        return found

    def is_of(self, study: Study) -> bool:
        """Return whether it has the study's revision: rows of another mean something else."""
        return bool(self.config.get("revision", 1) == study.revision)

    def data(self, study: Study) -> Data:
        """Return the summary of the rows, as JSON has it."""
        return as_json(study.summarise(self.rows, self.config))


def read(folder: Path) -> Record:
    """Return the record in a folder.

    Raises:
        ConfigError: There is none, or it can't be read.
    """
    path = folder / RECORD
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise ConfigError(
                f"{path} has format {header['format']}, this version reads {FORMAT}: make it "
                "again with --force"
            )
        lines = (folder / ROWS).read_text(encoding="utf-8").splitlines()
        record = Record(
            folder=folder,
            header=header,
            rows=[json.loads(line) for line in lines],
            findings=tuple(Finding.from_dict(finding) for finding in header["findings"]),
        )
        assert {"name", "config", "commit", "hardware", "seconds"} <= header.keys()
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no record of a study ({type(error).__name__}: {error}): make it again "
            "with --force"
        ) from error
    return record


def there(folder: Path, study: Study, config: Data) -> Record | None:
    """Return the record of this study with this config; None where there is no folder.

    Raises:
        ConfigError: The folder is another study's or of other settings, or no record at all.
    """
    if not folder.exists():
        return None
    found = read(folder)
    refuse_others(folder, {"study": found.name, **found.config}, {"study": study.key, **config})
    return found


def refuse_others(folder: Path, before: Data, now: Data) -> None:
    """Refuse a folder whose settings are not these.

    Raises:
        ConfigError: They differ; the message has the first ones.
    """
    changed = [
        f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds another study or other settings ({'; '.join(changed[:4])}): ask for "
            "the same, name another folder, or make it anew with --force"
        )


def committed(key: str, results: Path | None = None) -> Record | None:
    """Return the newest committed record of a study; None if there is none."""
    results = results or RESULTS
    # Inside another folder are a group's records; what a suite keeps there is the suite's own.
    inside = results.glob(f"*/*/{RECORD}") if "/" in key else ()
    paths = (*results.glob(f"*/{RECORD}"), *inside)
    own = [path.parent for path in sorted(paths) if _name_in(path) == key]
    return read(own[-1]) if own else None


def needed(key: str) -> Record:
    """Return the newest committed record of a study.

    Raises:
        ConfigError: This installation has none, since records come with a clone only.
    """
    found = committed(key)
    if found is None:
        raise ConfigError(
            f"{RESULTS} must have a record of {key}, and has none: install from a clone of the "
            'repository, with pip install -e "."'
        )
    return found


def _name_in(path: Path) -> str | None:
    try:
        found: str | None = json.loads(path.read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError, AttributeError):
        return None
    return found


def write(folder: Path, study: Study, config: Data, rows: Sequence[Row], seconds: float) -> Record:
    """Write rows, findings, page and picture in place of an earlier record, whole or not at all.

    Args:
        folder: Folder of the record.
        study: The study.
        config: Settings that all rows share.
        rows: Rows of all cells.
        seconds: Time that the cells took, interrupted attempts not counted.
    """
    header = {
        "format": FORMAT,
        "name": study.key,
        "title": study.title,
        "config": config,
        "seconds": seconds,
        **provenance(),
    }
    return put(folder, study, header, rows)


def put(folder: Path, study: Study, header: Mapping[str, Any], rows: Sequence[Row]) -> Record:
    """Write a record whose origin is known already: a committed one elsewhere, say."""
    added = Counter(row[COMMIT] for row in rows if COMMIT in row)
    header = {**header, **({"added": dict(added)} if added else {})}
    draft, former = (
        folder.with_name(f".{folder.name}.{os.getpid()}{end}") for end in ("", ".former")
    )
    try:
        draft.mkdir(parents=True)
        lines = (json.dumps(strict(row), allow_nan=False) + "\n" for row in rows)
        write_text(draft / ROWS, "".join(lines))
        write_json(draft / RECORD, {**header, "findings": []})
        # What is judged and drawn is what was written: numbers not finite have become null.
        data = read(draft).data(study)
        findings = study.findings(data)
        write_json(draft / RECORD, {**header, "findings": [f.to_dict() for f in findings]})
        write_text(draft / README, page(study, data, findings, header))
        draw(draft, study, data)
        if folder.exists():
            folder.rename(former)
        draft.rename(folder)
    finally:
        if former.exists() and not folder.exists():
            former.rename(folder)
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
    return read(folder)


def draw(folder: Path, study: Study, data: Data) -> None:
    """Write a record's picture."""
    from experiments.output.plots import save_figure  # slow to load

    save_figure(study.draw(data), folder / PICTURE)
