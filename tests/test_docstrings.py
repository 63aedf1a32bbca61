"""Docstrings that stand alone in an editor's hover."""

import ast
import itertools
import pkgutil
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zenflow", "sim", "autotune", "experiments", "evidence")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
FILE = re.compile(rf"`((?:{'|'.join(PACKAGES)}|docs|tests)/[a-z0-9_/.-]+\.[a-z]+)`")
"""A file of the repository, in backticks."""
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


def words_of(path):
    """Yield the line and the text of each string and comment of a file."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                yield token.start[0], token.string


def is_there(name):
    """Whether a dotted name is that of a module, or of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def names_in(text, package=None):
    """Yield the modules, and what is in them, that a text names in backticks.

    In a package a name may leave that out, as `step.engine` does within zenflow.
    """
    for name in re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:\(\))?`", text):
        first = name.split(".")[0]
        if first in PACKAGES:
            yield name
        elif package and (ROOT / package / first).is_dir():
            yield f"{package}.{name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_files_that_are_named_exist(package):
    wrong = []
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] != package:
            continue
        for line, text in words_of(path):
            wrong += [
                f"{path.relative_to(ROOT)}:{line}: {name}"
                for name in names_in(text, package)
                if not is_there(name)
            ]
            wrong += [
                f"{path.relative_to(ROOT)}:{line}: {name}"
                for name in re.findall(FILE, text)
                if not (ROOT / name).exists()
            ]
    assert wrong == []


def test_a_module_that_does_not_exist_is_noticed():
    text = "`step.engine`, `step.no_such_module`, `zenflow.step.engine.Engine`, `self.step.engine`"
    named = list(names_in(text, "zenflow"))
    assert [name for name in named if not is_there(name)] == ["zenflow.step.no_such_module"]
    assert len(named) == 3
