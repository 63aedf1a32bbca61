"""README and docs: short, every link leads somewhere, every Python block runs."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from evidence.pages.links import targets
from tests.test_docstrings import is_there, names_in

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MADE = {"results.md", "gpu.md", "validation.md", "reproduction.md"}
"""Pages made from records."""
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md"))
MADE_FOLDERS = {"notebooks", "results", "validation"}
WRITTEN = [
    README, *(p for p in PAGES if p.name not in MADE and p.parent.name not in MADE_FOLDERS)
]  # fmt: skip
"""Pages that people write."""
LINKED = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
          ROOT / "notebooks" / "README.md", *PAGES]  # fmt: skip
OTHERS = {
    "trainers.md": "tests/zenflow/integrations/test_guide.py",
    "many-gpus.md": "tests/zenflow/sharded/ranks.py",
}
"""Pages whose blocks warn in other packages, and the test that runs them."""
MOST_WORDS = 30
PACKAGES = "zenflow|sim|autotune|experiments|evidence"
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors_of(path):
    """Return what a page's headings are linked by, on GitHub and on the site."""
    found, times = set(), {}
    for heading in re.findall(r"^#+ (.*)", FENCE.sub("", path.read_text("utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        times[slug] = times.get(slug, 0) + 1
        found.add(slug if times[slug] == 1 else f"{slug}-{times[slug] - 1}")
    return found


def sentences_of(text):
    """Return the sentences of a page's paragraphs, list items and cells."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"^(    .*|#.*|:::.*)$", "", text, flags=re.MULTILINE)  # commands, headings
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |^\s*[-*] |[|]", text)
    return [
        s for part in parts for s in re.split(r"(?<=[.!?:;])[*)]*\s", " ".join(part.split())) if s
    ]


def python_blocks(path):
    return PYTHON.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_relative_link_and_anchor_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    own = [f"#{anchor}" for anchor in re.findall(r"\]\(#([^)\s]+)\)", FENCE.sub("", text))]
    for target in [*targets(text), *own]:
        path, _, anchor = target.partition("#")
        meant = (page.parent / path).resolve() if path else page
        assert meant.exists(), f"{target} on {name_of(page)} leads nowhere"
        if anchor:
            assert anchor in anchors_of(meant), f"{target}: {name_of(meant)} has no such heading"


def test_links_are_found_and_code_is_none():
    text = "[a](b.md) ![c](d.png)\n```\n[no](no.md)\n```\n[e](f.md#g) [h](https://i.j) [k](#l)"
    assert targets(text) == ["b.md", "d.png", "f.md#g"]


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_sentences_are_short(page):
    long = [s for s in sentences_of(page.read_text("utf-8")) if len(s.split()) > MOST_WORDS]
    assert long == []


@pytest.mark.filterwarnings("ignore:these DeepSpeed keys", "ignore:.*every 100 steps")  # as told
@pytest.mark.parametrize(
    "page", [p for p in WRITTEN if python_blocks(p) and p.name not in OTHERS], ids=name_of
)
def test_every_python_block_runs_after_those_before_it(page, request, monkeypatch):
    needs_drive = page.name == "drive.md"  # tests' own folder may be in memory
    monkeypatch.chdir(request.getfixturevalue("state_dir" if needs_drive else "tmp_path"))
    names = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_the_readmes_example_learns(capsys):
    (code,) = python_blocks(README)
    assert len(code.splitlines()) <= 25
    exec(compile(code, str(README), "exec"), {})
    loss, stall_seconds = capsys.readouterr().out.split()[-2:]
    assert 0 < float(loss) < 1
    assert float(stall_seconds) >= 0


def test_messages_that_troubleshooting_explains_are_in_the_source():
    text = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", text.split("## The device")[0], re.MULTILINE)
    sources = [
        " ".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8")).split())
        for package in ("zenflow", "experiments")
        for path in (ROOT / package).rglob("*.py")
    ]
    assert len(quoted) >= 5
    for message in quoted:
        parts = [part.strip() for part in message.split("...")]
        assert any(all(part in source for part in parts) for source in sources), message


def test_commands_and_modules_that_pages_name_exist():
    from experiments.cli import main

    commands = {*main.commands, "study"}
    for page in [*WRITTEN, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"(?:`|^    )zenflow ([a-z]+)", text, re.MULTILINE):
            assert command in commands, f"{name_of(page)}: zenflow {command}"
        for module in re.findall(r"python -m ([\w.]+)", text):
            assert find_spec(module) is not None, f"{name_of(page)}: {module}"
        for name in names_in(text):
            assert is_there(name), f"{name_of(page)}: {name}"
        for file in re.findall(rf"`((?:{PACKAGES}|tests)/[\w/.-]+)`", text):
            assert (ROOT / file).exists(), f"{name_of(page)}: {file}"


def test_contributing_has_every_room_of_the_packages():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package in PACKAGES.split("|"):
        rows = "".join(re.findall(rf"^\| (`{package}/.*?) \|", table, re.MULTILINE))
        named = set(re.findall(r"`(?:\w+/)?(\w+)`", rows))
        rooms = {path.parent.name for path in (ROOT / package).glob("[a-z]*/[!.]*")}
        assert rooms == named, package
