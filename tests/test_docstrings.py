"""Docstrings that stand alone in an editor's hover."""

import ast
import functools
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
PRONOUN = re.compile(
    r"(?:It|Its|They|Their|Theirs|Them|That|These|Those|The same|(?:(?:Return|Yield) )?[Ww]hat)\b"
    r"|This(?=[,:;.]| (?:is|was|are|has|had|does|can|may|must|will|would|one|also|only)\b)"
)
"""Opening that refers to words which the reader of a hover does not see."""
UNIT = re.compile(r"[Ss]econds|[Bb]ytes|FLOP|[Ss]teps|[Tt]okens|[Ee]lements")
FEWEST_WORDS = 4
"""Number of words from which on a field's docstring says more than the field's name."""


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


def docstrings(tree):
    """Yield each docstring of a module, class, function or field: its line and the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
    yield from fields(tree)


@functools.cache  # parsing takes longest
def trees_of(package):
    """Return the name and the syntax tree of each module of a package."""
    return [
        (path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8")))
        for path in MODULES
        if path.relative_to(ROOT).parts[0] == package
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_docstring_begins_with_no_pronoun(package):
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, tree in trees_of(package)
        for line, text in docstrings(tree)
        if PRONOUN.match(text)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_fields_docstring_says_more_than_its_name(package):
    found = [
        f"{name}:{line}: {text}"
        for name, tree in trees_of(package)
        for line, text in fields(tree)
        if len(text.split()) < FEWEST_WORDS and not UNIT.search(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "refers"),
    [
        ("It ends.", True),
        ("The same for rows.", True),
        ("Return what is left.", True),
        ("This is an end.", True),
        ("This rank's rows.", False),
        ("Items that wait.", False),
        ("Return whatever rows there are.", False),
        ("Thatched roof.", False),
    ],
)
def test_a_pronoun_is_told_from_a_noun(text, refers):
    assert bool(PRONOUN.match(text)) == refers


@pytest.mark.parametrize("package", PACKAGES)
def test_a_fields_docstring_is_a_phrase_that_stands_alone(package):
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, tree in trees_of(package)
        for line, text in fields(tree)
        if text.split()[0].rstrip(",:") in PREPOSITIONS
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_says_what_the_import_contracts_prove(package):
    found = [
        str(name)
        for name, tree in trees_of(package)
        if (ast.get_docstring(tree) or "").rstrip().endswith("No torch.")
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
