"""The documentation site: builds without a warning, and asks nothing of another server."""

import html
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason='needs what builds the site: pip install -e ".[docs]"')

import torch

import zenflow
from evidence.pages.doctests import fenced

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


def entries(site):
    """Return each entry of zenflow's reference: its address, and the text up to the next one."""
    page = (site / "api" / "zenflow.html").read_text(encoding="utf-8")
    page, _ = page.split('id="in-your-trainer"')
    _, *parts = re.split(r'id="(zenflow\.[\w.]+)" class="doc doc-heading"', page)
    texts = [html.unescape(re.sub(r"<[^>]+>", "", part)) for part in parts[1::2]]
    return dict(zip(parts[::2], (re.sub(r"\s", "", text) for text in texts), strict=True))


def exported():
    return {name: getattr(zenflow, name) for name in set(zenflow.__all__) - {"__version__"}}


def own_attributes(kind):
    """Yield the public attributes that zenflow gives a class: where they may be, name and type.

    A base that is exported itself has its attributes on the page once.
    """
    bases = [base for base in kind.__mro__ if base.__module__.startswith("zenflow.")]
    for base in bases:
        annotations = inspect.get_annotations(base)
        for name in {*vars(base), *annotations}:
            if not name.startswith("_"):
                homes = [kind, *(other for other in bases if other in exported().values())]
                places = {f"{home.__module__}.{home.__qualname__}.{name}" for home in homes}
                yield places, name, annotations.get(name)


def test_public_names_are_in_the_reference_and_no_others(site):
    classes = {name for name, value in exported().items() if isinstance(value, type)}
    names = [address.split(".")[-2:] for address in entries(site)]
    assert {name for home, name in names if home not in classes} == set(exported())


def test_public_attributes_are_in_the_reference_with_their_types(site):
    there = entries(site)
    for kind in exported().values():
        if isinstance(kind, type):
            for places, name, annotation in own_attributes(kind):
                found = places & there.keys()
                assert found, f"{kind.__name__}.{name} has no entry"
                if annotation is not None:
                    said = f"{name}:{annotation}".replace(" ", "").replace("ClassVar", "")
                    assert said.replace("'", '"') in there[found.pop()], f"{kind.__name__}: {said}"


def test_what_an_optimizer_has_beside_torchs_is_declared():
    params = [torch.nn.Parameter(torch.zeros(64, 64))]
    optimizer = zenflow.ZenFlowAdamW(params)
    beside = vars(optimizer).keys() - vars(torch.optim.AdamW(params)).keys()
    declared = {name for _, name, _ in own_attributes(zenflow.ZenFlowAdamW)}
    assert {name for name in beside if not name.startswith("_")} <= declared
    optimizer.close()


def test_the_search_finds_each_method_that_a_page_calls(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    for entry in index["docs"]:
        text = html.unescape(re.sub(r"<[^>]+>", "", entry["text"]))
        words = set(re.split(index["config"]["separator"], text))
        called = set(re.findall(r"\.([a-z]\w+)\(", text))
        assert called <= words, entry["location"]


def test_the_search_finds_the_tables_of_records(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = [entry["location"] for entry in index["docs"]]
    assert any("evidence/results/" in place for place in places)


def test_examples_without_a_section_get_a_fence():
    assert fenced("A.\n\n>>> 1\n1\n\nB.") == "A.\n\n```pycon\n>>> 1\n1\n```\n\nB."
    assert fenced("Examples:\n    >>> 1\n    1") == "Examples:\n    >>> 1\n    1"
