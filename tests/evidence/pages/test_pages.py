"""Made pages are what templates render from records; a lookup that finds nothing is an error."""

import pytest
from click.testing import CliRunner

from evidence.pages import build, formats, lookups
from evidence.pages.window_picture import NUM_BLOCKS, NUM_STEPS, PICTURE, windows
from evidence.published.runs import published
from experiments.lab.record import needed
from zenflow import ZenFlowConfig
from zenflow.errors import ConfigError


def run(*arguments):
    return CliRunner().invoke(build.main, arguments)


@pytest.fixture
def templates(tmp_path, monkeypatch):
    """A folder in place of the templates', with a function that writes one."""
    monkeypatch.setattr(build, "TEMPLATES", tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    return write


def test_committed_pages_are_what_the_templates_render():
    assert list(build.stale(build.pages())) == [], "made by python -m evidence.pages.build"
    assert list(build.unmade()) == []


def test_a_page_that_differs_or_that_no_template_makes_fails_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(lookups, "ROOT", tmp_path)
    page = build.Page(path="docs/results/whatif.md", template="docs/results/whatif.md.j2")
    monkeypatch.setattr(build, "pages", lambda: [page])
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(build, "render", lambda template, **values: "made\n")
    assert run("--check").exit_code == 1
    assert run(page.path).exit_code == 0
    assert (tmp_path / page.path).read_text() == "made\n"
    assert run("--check").exit_code == 0
    (tmp_path / "docs" / "results" / "gone.md").write_text("old")
    assert "gone.md (no template makes it: remove it)" in run("--check").output
    assert run("--check", page.path).exit_code == 0


@pytest.mark.parametrize("arguments", [["docs/nothing.md"], ["--check", "docs/nothing.md"]])
def test_a_page_that_is_not_made_is_refused(arguments):
    assert "docs/nothing.md" in run(*arguments).output
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{{ record('sst2').config.nothing }}", "nothing"),
        ("{{ record('sst3') }}", "sst3"),
        ("{{ record('sst2').table('nothing') }}", "nothing"),
        ("{{ record('sst2').ours('nothing') }}", "nothing"),
        ("{{ benchmark('nothing') }}", "nothing"),
        ("{{ benchmark('host_update', '2000-01-01') }}", "2000-01-01"),
        ("{{ [{'a': 1}] | one(a=2) }}", "{'a': 2}"),
        ("{{ [{'a': 1}] | one(nothing=2) }}", "nothing"),
        ("{{ given(1 > 2) }}", "write it anew"),
        ("{{ nothing }}", "nothing"),
        ("{{ 1 | nothing }}", "nothing"),
        ("{{ 1", "end"),
    ],
)
def test_a_lookup_that_finds_nothing_names_template_line_and_key(templates, text, key):
    templates("bad.md.j2", f"# Title\n\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        build.render("bad.md.j2", page="docs/bad.md")
    place, _, message = str(raised.value).partition(": ")
    assert place == "bad.md.j2:3"
    assert key in message


def test_a_lookup_in_a_template_that_another_imports_names_the_imported_one(templates):
    templates("page.md.j2", "{% import 'part.md.j2' as part with context %}\n{{ part.x }}")
    templates("part.md.j2", "\n{% set x = nothing.at_all %}\n")
    with pytest.raises(ConfigError, match=r"^part\.md\.j2:2: 'nothing'"):
        build.render("page.md.j2", page="docs/page.md")


def test_only_what_stands_between_marks_is_made(templates):
    templates("sections/a.md.j2", "new {{ page }}\n")
    begin, end = "<!-- made: a -->", "<!-- end: a -->"
    made = build.with_sections(f"x\n{begin}\nold\n{end}\ny", "p.md")
    assert made == f"x\n{begin}\nnew p.md\n{end}\ny"
    for broken in ("x", f"{begin}\nold", f"{end}\nold\n{begin}\n", f"{begin}\n{begin}\n{end}\n"):
        with pytest.raises(ConfigError, match="put the marks back"):
            build.with_sections(broken, "p.md")


def test_links_lead_from_the_page_that_is_made(templates):
    templates("page.md.j2", "{{ link('docs/a.md') }}")
    for page, way in (
        ("README.md", "docs/a.md"),
        ("docs/b.md", "a.md"),
        ("docs/c/d.md", "../a.md"),
    ):
        assert build.render("page.md.j2", page=page) == f"{way}\n"


def test_a_side_is_said_once_and_never_of_the_other_sign():
    assert formats.beside(-0.0204) == "2.04% below"
    assert formats.beside([0.01, 0.02], 0) == "1% and 2% above"
    assert formats.beside([-0.01, 0.02, 0.03], 0) == "1% below, 2% above and 3% above"
    assert formats.span([-0.0017, -0.0001]) == "0.01% to 0.17% below"
    assert formats.span([0.03, -0.01], 0) == "1% below to 3% above"


def test_every_published_row_and_group_is_on_one_page():
    (record,) = needed("published").rows
    text = "".join(
        page.text() for page in build.pages() if page.path.startswith("docs/validation")
    )
    for title in (group.title for group in published().groups.values()):
        assert text.count(f"\n## {title}\n") == 1, title
    assert all(f"| {row['label']} |" in text for row in record["rows"])


def test_the_picture_shows_the_windows_of_the_engine():
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=3)
    found = list(windows(config, NUM_STEPS))
    for block in range(NUM_BLOCKS):
        first, *later = [w for w in found if w.block == block]
        assert first.due <= 3
        assert all(w.due - w.opened == 3 for w in later)
    assert all(w.lands - w.due == 1 for w in found)
    assert PICTURE.is_file()
