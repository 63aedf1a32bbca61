"""Results of a call: an archive of all records and a short table, both whole at any moment."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.benchmarks.gpu.loan.bring import REPOSITORY
from experiments.output.files import fsync_folder, replacing, write_json, write_text
from zenflow.errors import ConfigError

SUITE = "suite.json"
"""Record of how each part ended."""
ARCHIVE, TABLE, LOG, FIGURES = "records.tar.gz", "table.txt", "log.txt", "figures.json"
_MOST_BYTES = 32 << 20
"""Bytes of the largest file that is put into the archive."""
_TEXTS = (".txt", ".xml")
"""Ends of the names of files that processes write, with paths in them."""
_LAST_LINES = 4
"""Lines of the log that a failed part shows."""
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_WIDTH = 62


def write_archive(folder: Path, out: Path) -> None:
    """Put all files of a folder into an archive that takes the former one's place.

    Files may still be written: each is read once, as it is.
    """
    with replacing(out / ARCHIVE) as draft:
        with tarfile.open(draft, "w:gz", compresslevel=5) as archive:
            for path in sorted(folder.rglob("*")):
                _add(archive, path, path.relative_to(folder.parent))
        fsync_folder(out)


def forget_drafts(out: Path) -> None:
    """Remove what a call that was killed while it wrote has left beside whole files."""
    for name in (ARCHIVE, TABLE):
        for draft in out.glob(f".{name}.*"):
            draft.unlink()


def _add(archive: tarfile.TarFile, path: Path, name: Path) -> None:
    try:
        if path.is_symlink() or not path.is_file():
            return
        if path.stat().st_size > _MOST_BYTES:
            name, data = name.with_name(f"{name.name}.left_out"), b"larger than 32 MiB\n"
        else:
            data = path.read_bytes()
            if path.suffix in _TEXTS:  # where the tree lay there says nothing elsewhere
                data = data.replace(str(REPOSITORY).encode(), b".")
    except OSError:
        return  # a draft that has become a file meanwhile
    member = tarfile.TarInfo(str(name))
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def unpack(archives: Sequence[Path], folder: Path) -> None:
    """Put the records of some calls into one folder, as if one call had run all their parts.

    Of a part that several calls have run, the last one's records stay.

    Raises:
        ConfigError: An archive holds no call's records, or they are of several commits or GPUs.
    """
    whole: dict[str, Any] | None = None
    for path in archives:
        with tempfile.TemporaryDirectory() as place:
            try:
                with tarfile.open(path) as archive:
                    # Python 3.10.12 and 3.11.4 are the first to know filters.
                    archive.extraction_filter = getattr(tarfile, "data_filter", None)
                    archive.extractall(place)
                (root,) = Path(place).iterdir()
                found = json.loads((root / SUITE).read_text(encoding="utf-8"))
            except (OSError, ValueError, tarfile.TarError) as error:
                raise ConfigError(
                    f"{path} must be a {ARCHIVE} that a call of a loan has left ({error})"
                ) from error
            whole = whole or {**found, "parts": []}
            first, own = ((each["commit"], each["hardware"]["gpu"]) for each in (whole, found))
            if first != own:
                raise ConfigError(
                    f"archives must be of one commit and one GPU, and {path} is of {own} beside "
                    f"{first}: keep each of them by itself"
                )
            again = {part["part"] for part in found["parts"]}
            kept = [part for part in whole["parts"] if part["part"] not in again]
            whole["parts"] = [*kept, *found["parts"]]
            shutil.copytree(root, folder, dirs_exist_ok=True)
    write_json(folder / SUITE, whole or {})


def outcomes(log: str) -> dict[str, int]:
    r"""Return how many tests ended in each way, by the lines of `pytest -v`; cut ones don't count.

    >>> outcomes("a.py::one PASSED [ 50%]\n[gw0] [ 99%] FAILED a.py::two\na.py::three ")
    {'PASSED': 1, 'FAILED': 1}
    """
    found: dict[str, int] = {}
    for line in log.splitlines():
        if "::" not in line or line.startswith(("FAILED ", "ERROR ", "SKIPPED ")):
            continue  # the summary at the end names them again
        if match := _OUTCOME.search(line):
            found[match[1]] = found.get(match[1], 0) + 1
    return found


def table(whole: Mapping[str, Any], folder: Path, predicted: Mapping[str, str]) -> str:
    """Return how each part ended, what failed says last, and figures beside predictions."""
    hardware = whole["hardware"]
    lines = [
        f"call {whole['call']}: {hardware['gpu'] or 'no GPU: a smoke run on the CPU'}, "
        f"{hardware['cores']} cores, torch {whole['versions'].get('torch')}, "
        f"commit {whole['commit'] or 'unknown'}",
        f"host kernel: {whole['kernel']}",
        *([f"missing packages: {', '.join(whole['missing'])}"] if whole["missing"] else []),
        "",
        f"{'part':<20}{'seconds':>9}{'limit':>7}  ended",
    ]
    for part in whole["parts"]:
        lines.append(
            f"{part['part']:<20}{part['seconds']:>9.1f}{part['limit']:>7.0f}  "
            f"{part['ended']}{_tests(folder / part['part'])}"
        )
        if part["code"]:
            lines += [f"    {line}" for line in _log(folder / part["part"])[-_LAST_LINES:]]
    return "\n".join([*lines, "", *_figures(whole, folder, predicted)]).rstrip() + "\n"


def _log(folder: Path) -> list[str]:
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line[:160] for line in text.splitlines() if line.strip()]


def _tests(folder: Path) -> str:
    found = outcomes("\n".join(_log(folder)))
    return "".join(f", {count} {how.lower()}" for how, count in sorted(found.items()))


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the figures that a part has left; nothing where it has not come so far."""
    try:
        found: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _figures(
    whole: Mapping[str, Any], folder: Path, predicted: Mapping[str, str]
) -> Iterator[str]:
    known = {
        f"{part['part']}: {name}": value
        for part in whole["parts"]
        for name, value in figures_of(folder / part["part"]).items()
    }
    yield f"{'what':<{_WIDTH}}{'measured':>14}  predicted"
    for name in [*known, *(name for name in predicted if name not in known)]:
        value = known.get(name, "-")
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        yield f"{name:<{_WIDTH}}{shown:>14}  {predicted.get(name, '')}".rstrip()


def save(whole: Mapping[str, Any], folder: Path, out: Path, predicted: Mapping[str, str]) -> str:
    """Write the archive and the table; return the table."""
    text = table(whole, folder, predicted)
    write_text(out / TABLE, text)
    write_archive(folder, out)
    return text
