"""Examples in the reference: every public class and function shows what one gets."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
REFERENCES = ("sim", "autotune")
"""Pages whose every entry has an example."""
ENTRY = re.compile(r"^::: (\S+)(?:\n +options: \{.*?members: \[([^\]]*)\])?", re.MULTILINE)
POINTER = re.compile(r"See `([\w.]+)`")
"""An example that another docstring has, by a dotted name or one of the same module."""


def entries(page):
    """Yield the dotted names of a page's entries."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    for place, members in ENTRY.findall(text):
        yield from (
            (f"{place}.{name.strip()}" for name in members.split(",")) if members else [place]
        )


def example_of(thing):
    """Return the docstring that holds a thing's example: its own, or the one that it points to."""
    text = inspect.getdoc(thing) or ""
    pointer = POINTER.search(text)
    if ">>> " in text or pointer is None:
        return text
    name = pointer[1]
    if name.split(".")[0] not in REFERENCES:
        name = f"{thing.__module__}.{name}"
    return inspect.getdoc(pkgutil.resolve_name(name)) or ""


@pytest.mark.parametrize("page", REFERENCES)
def test_every_class_and_function_of_the_reference_has_an_example_or_points_to_one(page):
    lacking = [
        name for name in entries(page) if ">>> " not in example_of(pkgutil.resolve_name(name))
    ]
    assert lacking == []


def test_pages_list_entries_one_by_one_and_by_module():
    found = list(entries("sim"))
    assert "sim.models.workload.Workload" in found
    assert "sim.simulate.Prediction" in found
