"""Hooks of mkdocs: the README is the start page, and files beside docs/ come along if linked.

Pages in docs/ link to records, notebooks and CONTRIBUTING.md as they lie in the repository, so
that the links work there. The site has copies of these below ``repository/``.
"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

from evidence.pages.links import opened, replaced, targets

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_PAGES: dict[str, Path] = {}
"""File in the repository that each page of the site is made from."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the start page, and every file beside docs/ that a page links to, links of its own."""
    files.append(_file(ROOT / "README.md", "index.md", config))
    _PAGES.clear()
    _PAGES["index.md"] = ROOT / "README.md"
    for page in files.documentation_pages():
        _PAGES.setdefault(page.src_uri, DOCS / page.src_uri)
    waiting = list(_PAGES.values())
    while waiting:
        page_path = waiting.pop()
        for target in targets(page_path.read_text(encoding="utf-8")):
            path = _meant(page_path, target)
            uri = _uri(path)
            if not path.is_file() or files.get_file_from_path(uri) is not None:
                continue
            files.append(_file(path, uri, config))
            if path.suffix == ".md":
                _PAGES[uri] = path
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has what they mean."""
    del config, files
    here, source = page.file.src_uri, _PAGES[page.file.src_uri]

    def moved(target: str) -> str:
        _, hash_mark, anchor = target.partition("#")
        uri = _uri(_meant(source, target))
        return posixpath.relpath(uri, posixpath.dirname(here)) + hash_mark + anchor

    return replaced(markdown, moved)


def _meant(page: Path, target: str) -> Path:
    """Return the file that a link on a page means."""
    return opened(Path(os.path.normpath(page.parent / target.partition("#")[0])))


def _uri(path: Path) -> str:
    """Return where the site has a file of the repository."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def _file(path: Path, uri: str, config: MkDocsConfig) -> File:
    return File.generated(config, uri, abs_src_path=str(path))
