"""docs/results.md, its studies, the README's numbers and the concepts' picture."""

import re
from dataclasses import replace

import pytest

from evidence.pages import late_updates, trainers
from evidence.pages.commentary import SECTIONS
from evidence.pages.headlines import headlines
from evidence.pages.results import DOCS, README, documents, readme, with_part, write
from evidence.pages.window_picture import NUM_BLOCKS, NUM_STEPS, PICTURE, windows
from experiments.lab.record import README as RECORD_PAGE
from experiments.output.provenance import RESULTS
from tests.zenflow.conformance import document as refusals_page
from zenflow import ZenFlowConfig
from zenflow.errors import ConfigError

MADE = "made by python -m evidence.pages.results"
NUMBER = re.compile(r"(?<![\w.=-])[+-]?(\d[\d,]*\.?\d*)(%?)(?!\w)")
TEXTS = {".md", ".txt", ".json", ".jsonl"}


def test_results_and_the_readmes_numbers_are_what_the_records_say():
    made = documents()
    there = [DOCS / "results.md", *(DOCS / "results").iterdir()]
    assert {path.relative_to(DOCS).as_posix() for path in there} == made.keys(), MADE
    for address, page in made.items():
        assert (DOCS / address).read_text(encoding="utf-8") == page, f"{address}: {MADE}"
    text = README.read_text(encoding="utf-8")
    assert text == readme(text), MADE


def test_the_page_of_late_updates_has_the_record_s_picture_and_table():
    text = late_updates.DOCUMENT.read_text(encoding="utf-8")
    assert text == late_updates.document(text), "made by python -m evidence.pages.late_updates"


def test_the_page_of_limits_has_every_refusal_of_the_suite():
    text = refusals_page.DOCUMENT.read_text(encoding="utf-8")
    made = "made by python -m tests.zenflow.conformance.document"
    assert text == refusals_page.document(text), made


def test_the_guide_of_trainers_has_the_record_s_table():
    text = trainers.DOCUMENT.read_text(encoding="utf-8")
    assert text == trainers.document(text), "made by python -m evidence.pages.trainers"


def test_what_a_failed_or_skipped_test_would_have_compared_is_left_out():
    noted = "".join(
        f'<property name="{name}" value="{value}"/>'
        for name, value in {"trainer": "T", "mode": "keep", "compared": "losses",
                            "packages": "numpy"}.items()
    )  # fmt: skip
    case = "<testcase><properties>{}</properties>{}</testcase>"
    report = "".join(
        case.format(noted, end) for end in ("", "<failure/>", "<skipped/>", "<error/>")
    )
    (row,) = trainers.compared(f"<testsuites>{report}</testsuites>")
    assert row["versions"].startswith("numpy ")
    assert trainers.compared("<testsuites><testcase/></testsuites>") == []


def test_every_made_page_is_written(tmp_path):
    write(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert written == documents().keys()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_the_index_shows_each_study_in_short_and_links_to_all_of_it(section):
    index = documents()["results.md"].split(f"\n## {section.title}\n")[1].split("\n## ")[0]
    assert told(section.opening), "its main number"
    assert f"{section.opening} [All of it]({section.address}).\n" in index
    assert (DOCS / section.address).is_file()
    assert len(index.splitlines()) <= 8


def test_the_opening_is_the_first_paragraph_and_the_first_item_of_its_list():
    openings = {"A.\nB.\n\n- C\n  D\n- E\n\nF\n": "A. B. C D", "A.\n\nB:\n\n- C\n": "A."}
    for text, opening in openings.items():
        assert replace(SECTIONS[0], text=text).opening == opening


def told(text):
    """Return the numbers that a text tells with a decimal point or a per cent sign."""
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    return [(n.replace(",", ""), p) for n, p in NUMBER.findall(plain) if p or "." in n.strip(".")]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_numbers_of_the_commentary_are_in_the_record(section):
    folder = section.folder
    files = [folder / section.file]
    if section.record == "benchmarks":
        files += RESULTS.glob("2026-11-21_benchmarks_*/host_update.txt")
    text = " ".join(path.read_text(encoding="utf-8").replace(",", "") for path in files)
    known = [abs(float(number)) for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text)]
    for number, _ in told(section.text):
        places = len(number.partition(".")[2].rstrip("."))
        value = float(number)
        shares = (value, value / 100)
        assert any(
            abs(k - s) <= 0.5001 * 10.0 ** -(places + (2 if s != value else 0))
            for k in known
            for s in shares
        ), f"{number} of {section.title!r} is not in {folder.name}"


def test_each_headline_says_how_it_was_found_and_where():
    found = headlines()
    assert {line.kind for line in found} == {"measured", "emulated", "simulated"}
    for line in found:
        assert line.record.exists()


@pytest.mark.parametrize("file", [RECORD_PAGE, "table.txt"])
def test_a_record_that_is_missing_is_an_error(file):
    section = replace(SECTIONS[0], record="nothing", file=file)
    with pytest.raises(ConfigError, match="install from a clone"):
        section.folder  # noqa: B018


def test_a_text_without_its_marks_is_refused():
    begin, end = "<!-- made: a -->", "<!-- end: a -->"
    assert with_part(f"x\n{begin}\nold\n{end}\ny", "a", "new") == f"x\n{begin}\nnew\n{end}\ny"
    for broken in (f"{begin}\nold", f"{end}\nold\n{begin}\n", f"{begin}\n{begin}\n{end}\n"):
        with pytest.raises(ConfigError, match="must have a line"):
            with_part(broken, "a", "new")


def test_the_picture_shows_the_windows_of_the_engine():
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=3)
    found = list(windows(config, NUM_STEPS))
    for block in range(NUM_BLOCKS):
        first, *later = [w for w in found if w.block == block]
        assert first.due <= 3
        assert all(w.due - w.opened == 3 for w in later)
    assert all(w.lands - w.due == 1 for w in found)
    assert PICTURE.is_file()
