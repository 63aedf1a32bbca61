"""Docstrings that stand alone in an editor's hover."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zenflow", "sim", "autotune", "experiments", "benchmarks")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
PREPOSITIONS = frozenset(
    [
        "About",
        "Above",
        "After",
        "As",
        "At",
        "Before",
        "Behind",
        "Below",
        "Beside",
        "Between",
        "By",
        "During",
        "For",
        "From",
        "In",
        "Into",
        "Of",
        "On",
        "Over",
        "Since",
        "That",
        "Through",
        "To",
        "Under",
        "Until",
        "With",
        "Within",
        "Without",
    ]
)
"""Words by which the rest of a sentence begins: the reader of a hover sees no first half."""


def fields(tree):
    """Yield each variable or field with a docstring: its line and the text."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(place, ast.Assign | ast.AnnAssign) and is_text:
                yield text.lineno, str(text.value.value)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_fields_docstring_is_a_phrase_that_stands_alone(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in MODULES
        if path.relative_to(ROOT).parts[0] == package
        for line, text in fields(ast.parse(path.read_text(encoding="utf-8")))
        if text.split()[0].rstrip(",:") in PREPOSITIONS
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_says_what_the_import_contracts_prove(package):
    found = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if path.relative_to(ROOT).parts[0] == package
        and (text := ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
        and text.rstrip().endswith("No torch.")
    ]
    assert found == []
