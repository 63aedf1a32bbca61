"""Run the notebooks and write copies with outputs: ``python -m experiments.report.notebooks``.

``notebooks/NAME.ipynb`` becomes ``docs/notebooks/NAME.md`` with its pictures in ``NAME_files/``,
which GitHub shows as they are. The notebooks themselves stay without outputs.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.output.files import write_text
from zenflow.config import unknown_name
from zenflow.provenance import provenance

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
RENDERED = ROOT / "docs" / "notebooks"
CELL_SECONDS = 120
"""Seconds after which a cell counts as hung; none takes a tenth of it on two idle cores."""
KERNEL = "python3"

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STYLE = re.compile(r"<style.*?</style>\s*", re.DOTALL)
_LINE_END = re.compile(r"\s*\n\s*")
_CODE = re.compile(r"(^```python\n.*?\n```$)", re.DOTALL | re.MULTILINE)
_MANY_LINES = re.compile(r"(\n[ \t]*){3,}")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)]+?)\)")
_WARNINGS = "ignore:IProgress not found"
"""Warning of tqdm, which an import loads: it shows no bar, so its widgets need not be there."""
_COLUMNS = "140"
"""Columns of tables of characters: wide enough for all of them."""


def notebook_names() -> list[str]:
    """Return the names of all notebooks, in their order, without suffixes."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def read_notebook(name: str) -> NotebookNode:
    """Return a notebook as it is stored."""
    import nbformat

    read: Any = nbformat.read
    found: NotebookNode = read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return found


def execute(notebook: NotebookNode) -> None:
    """Run every cell in order, as if opened in its folder; outputs go into the notebook.

    Raises:
        CellExecutionError: A cell failed; the message has its source and its traceback.
        CellTimeoutError: A cell took longer than ``CELL_SECONDS``.
    """
    from nbclient import NotebookClient

    # A source tree that is not installed works too: the kernel is another process.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JUPYTER_COLUMNS": _COLUMNS,
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _WARNINGS])),
    }
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name=KERNEL,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    client.execute(env=environment)


def markdown(
    notebook: NotebookNode, name: str, origin: Mapping[str, Any]
) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's text for GitHub, and its pictures by path relative to the text.

    Args:
        notebook: With its outputs, which are simplified in place.
        name: Of the notebook.
        origin: Hardware, versions and commit of the outputs.
    """
    from nbconvert import MarkdownExporter

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _plain(cell.outputs)
        else:
            cell.source = _LINK.sub(_moved, cell.source)
    resources = {"output_files_dir": f"{name}_files"}
    exporter: Any = MarkdownExporter
    body, found = exporter().from_notebook_node(notebook, resources)
    parts = _CODE.split(body)  # code at the odd places
    parts[::2] = [_MANY_LINES.sub("\n\n", part) for part in parts[::2]]
    title, _, rest = "".join(parts).partition("\n\n")
    return f"{title.strip()}\n\n{_origin_line(name, origin)}\n\n{rest.strip()}\n", found["outputs"]


def _plain(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return outputs with one form each: a picture, a table of HTML, or text; texts are joined."""
    from nbformat.v4 import new_output

    kept: list[Any] = []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            kept.append(new_output("display_data", {"image/png": data["image/png"]}))  # type: ignore[no-untyped-call]
            continue
        if 'class="dataframe"' in data.get("text/html", ""):
            # GitHub shows a style sheet as text; a row to a line keeps differences legible.
            table = _LINE_END.sub("", _STYLE.sub("", data["text/html"])).replace("<tr", "\n<tr")
            kept.append(new_output("display_data", {"text/html": table}))  # type: ignore[no-untyped-call]
            continue
        text = _ANSI.sub("", output.get("text") or data.get("text/plain", ""))
        if kept and kept[-1].output_type == "stream":
            kept[-1].text += text
        else:
            kept.append(new_output("stream", name="stdout", text=text))  # type: ignore[no-untyped-call]
    return kept


def _moved(link: re.Match[str]) -> str:
    """Return a notebook's link as it must be in the copy: to a copy, or two folders up."""
    target = link[1]
    if target.endswith(".ipynb"):
        return f"]({target.removesuffix('.ipynb')}.md)"
    return f"](../{target})" if target.startswith("../") else f"](../../notebooks/{target})"


def _origin_line(name: str, origin: Mapping[str, Any]) -> str:
    machine = origin["hardware"]
    return (
        f"*Made from [notebooks/{name}.ipynb](../../notebooks/{name}.ipynb) by `python -m "
        f"experiments.report.notebooks`, commit {origin['commit']}, on {machine['cores']} cores "
        f"of {machine['cpu']}, {machine['gpu'] or 'no GPU'}, "
        f"Python {origin['versions']['python']}. What was measured, was measured there.*"
    )


def render(name: str, folder: Path, origin: Mapping[str, Any]) -> None:
    """Run a notebook and write its copy; an earlier one stays until the new one is whole.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = read_notebook(name)
    execute(notebook)
    text, pictures = markdown(notebook, name, origin)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{name}_files"
    draft = folder / f".{name}.{os.getpid()}"
    try:
        draft.mkdir()
        for path, picture in pictures.items():
            (draft / Path(path).name).write_bytes(picture)
        shutil.rmtree(files, ignore_errors=True)
        draft.rename(files)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    write_text(folder / f"{name}.md", text)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=RENDERED,
    help="Where the copies go; default: docs/notebooks.",
)  # fmt: skip
def main(names: tuple[str, ...], out: Path) -> None:
    """Run the notebooks of these names, or all, and write copies with outputs."""
    known = notebook_names()
    for name in names:
        if name not in known:
            raise click.UsageError(f"notebook {unknown_name(name, known)}")
    try:
        from nbclient.exceptions import CellExecutionError, CellTimeoutError
    except ImportError as error:
        raise click.ClickException(
            f'the notebooks need more packages ({error}): pip install -e ".[notebooks]"'
        ) from error
    origin = provenance()  # before a copy that changes makes the tree differ from its commit
    for name in names or known:
        started = time.perf_counter()
        try:
            render(name, out, origin)
        except (CellExecutionError, CellTimeoutError) as error:
            raise click.ClickException(f"{name} was not rendered:\n{error}") from error
        except KeyboardInterrupt:
            click.echo(f"Stopped at {name}; the copies before it are done.")
            sys.exit(130)
        click.echo(f"{out / name}.md ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
