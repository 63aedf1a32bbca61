"""The documentation site: builds without a warning, and asks nothing of another server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.pages.doctests import fenced

pytest.importorskip("mkdocs", reason="make docs installs what builds the site")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; --strict makes each warning, such as a dead link, an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8"), sheet


def test_every_page_of_docs_has_a_place_in_the_menu(site):
    start = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        address = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert f'href="{address}"' in start, address


def test_public_names_are_in_the_reference(site):
    import zenflow

    text = (site / "api" / "zenflow.html").read_text(encoding="utf-8")
    for name in set(zenflow.__all__) - {"__version__"}:
        assert re.search(rf'id="zenflow\.[\w.]*\b{name}"', text), name


def test_examples_without_a_section_get_a_fence():
    assert fenced("A.\n\n>>> 1\n1\n\nB.") == "A.\n\n```pycon\n>>> 1\n1\n```\n\nB."
    assert fenced("Examples:\n    >>> 1\n    1") == "Examples:\n    >>> 1\n    1"
