"""The page of ``zenflow report`` in a real browser: what it shows, and what it does when used."""

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR
from experiments.report.loading import load
from experiments.report.page import render
from tests.experiments.reported import (
    NUM_STEPS,
    STALL,
    timeline,
    write_decisions,
    write_profile,
    write_run,
    write_sweep,
)

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
Image = pytest.importorskip("PIL.Image")

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _browser_path(driver):
    """Return an installed Chromium: playwright's own, or the system's."""
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, _BROWSERS)]
    own = Path(driver.chromium.executable_path)
    return next((path for path in found if path), str(own) if own.is_file() else None)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        path = _browser_path(driver)
        if path is None:
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        # A container has no user name spaces for the sandbox; the page is our own.
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A page of everything that a page can show, with names that try to be markup."""
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "cmp" / "zero_offload", "zero_offload", mean_step_seconds=2.0)
    write_run(folder / "cmp" / "zenflow", "zenflow")
    names = ["zero_offload", "zenflow"]
    (folder / "cmp" / "config.json").write_text(json.dumps({"compare": names}))
    write_decisions(write_run(folder / "tuned", "<script>window.evil = 1</script>"))
    timeline(source="simulated").write(folder / "sim<img src=x onerror='window.evil=1'>.json")
    paths = [
        folder / "cmp", folder / "tuned", *folder.glob("sim*"),
        write_profile(folder / "profile.json"), write_sweep(folder / "sweep"),
    ]  # fmt: skip
    out = folder / "page.html"
    out.write_text(render(load(paths), title="<b>A report</b>", made={"command": "x", "at": "y"}))
    return out


@pytest.fixture
def page(browser, path):
    """The page, opened; nothing may go wrong on it and nothing may be asked for."""
    context = browser.new_context(viewport={"width": 1300, "height": 900}, color_scheme="light")
    opened = context.new_page()
    problems, asked = [], []
    opened.on("console", lambda said: problems.append(said.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert problems == []
    assert asked == [path.as_uri()]


def stage(page, place=0):
    found = page.locator(".stage").nth(place)
    found.scroll_into_view_if_needed()
    page.wait_for_timeout(300)  # while a page scrolls, its wheel goes on scrolling it
    return found


def view(found):
    return tuple(float(found.get_attribute(f"data-{end}")) for end in ("from", "to"))


def centre(found):
    box = found.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def colours_at(found, seconds, y):
    """Return the colours of a stage's screenshot at times of the whole trace, y pixels down."""
    pixels = np.asarray(Image.open(io.BytesIO(found.screenshot())).convert("RGB"))
    width = pixels.shape[1]
    places = [min(width - 1, int(at / NUM_STEPS * width)) for at in seconds]
    return ["#" + "".join(f"{channel:02x}" for channel in pixels[y, x]) for x in places]


def test_every_section_shows_what_it_is_of(page):
    assert page.locator("h2").all_inner_texts() == [
        "Summary", "Side by side", "Timelines", "Tuning", "Sweeps", "Provenance",
    ]  # fmt: skip
    cards = page.locator(".card.run").all_inner_texts()
    assert len(cards) == 6
    assert "zero_offload" in cards[0]
    assert "2 s" in cards[0]
    assert "30.0% stalled" in cards[0]
    assert page.locator(".badge", has_text="simulated").count() == 2  # its card, its lanes
    assert "c0ffee" in page.locator("#provenance").inner_text()
    assert "What helps most?" in page.locator("#sweeps").inner_text()
    assert "deadbeef" in page.locator("#provenance").inner_text()


def test_speeds_are_ranked_among_runs_of_the_same_work_alone(browser, tmp_path):
    for name, params, seconds in (("a", 1_000_000, 1.0), ("b", 1_000_000, 2.0), ("c", 7, 12.0)):
        write_run(tmp_path / name, name, num_params=params, mean_step_seconds=seconds)
    out = tmp_path / "page.html"
    made = {"command": "x", "at": "y"}
    out.write_text(render(load([tmp_path / n for n in "abc"]), title="x", made=made))
    opened = browser.new_page()
    opened.goto(out.as_uri())
    rows = opened.locator("#comparison-table tr").all_inner_texts()
    place = rows[0].split("\t").index("speed, slowest of its kind and work = 1")
    cells = {row.split("\t")[0]: row.split("\t") for row in rows[1:]}
    assert {name: row[place] for name, row in cells.items()} == {
        "a": "2\u00d7", "b": "1\u00d7", "c": "\u2013",
    }  # fmt: skip
    assert "1M parameters" in cells["a"][2]
    opened.close()


def test_names_are_text_and_never_run(page):
    assert page.evaluate("window.evil") is None
    assert page.locator("h1").inner_text() == "<b>A report</b>"
    assert "<script>window.evil" in page.locator("#summary").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("b").count() == 0  # a decision's reason is bold in its file alone


def test_injected_scripts_are_refused(browser, path, tmp_path):
    """Even if markup came through, the page's policy would not run it."""
    evil = tmp_path / "evil.html"
    text = path.read_text().replace("</body>", "<script>window.evil = 1</script></body>")
    evil.write_text(text)
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(evil.as_uri())
    assert opened.evaluate("window.evil") is None
    assert opened.locator("h2").count() == 6
    context.close()


def test_lanes_are_named_and_drawn_in_the_colours_of_their_spans(page):
    names = page.locator(".names").first.locator("div").all_inner_texts()
    assert names == ["device", "d2h", "h2d", "host"]
    found = stage(page)
    steps = range(NUM_STEPS)
    device = 17 + 24  # below the middle of the first lane, where no text is
    for offset, colour in (
        (0.03, SPAN_COLOURS["forward"]), (0.57, SPAN_COLOURS["backward"]),
        (STALL[1] - 0.03, STALL_COLOUR), (0.95, SPAN_COLOURS["step"]),
    ):  # fmt: skip
        seen = colours_at(found, [step + offset for step in steps], device)
        assert seen == [colour] * NUM_STEPS, offset
    copies = colours_at(
        found, [step + offset for step in steps for offset in (0.1, 0.5)], 17 + 35 + 24
    )
    assert copies[1::2] == [SPAN_COLOURS["grads"]] * NUM_STEPS
    assert SPAN_COLOURS["grads"] not in copies[::2]  # the link is idle there


def test_the_wheel_zooms_about_the_pointer_and_drag_pans(page):
    found = stage(page)
    assert view(found) == (0, NUM_STEPS)
    x, y = centre(found)
    x -= found.bounding_box()["width"] / 4
    page.mouse.move(x, y)
    page.mouse.wheel(0, -400)
    page.wait_for_function("document.querySelector('.stage').dataset.from > 0")
    low, high = view(found)
    assert high - low < NUM_STEPS / 2
    # What is a quarter of the way along stays there.
    assert low + (high - low) / 4 == pytest.approx(NUM_STEPS / 4, abs=0.02)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=4)
    page.mouse.up()
    moved, _ = view(found)
    assert moved - low == pytest.approx(
        100 / found.bounding_box()["width"] * (high - low), rel=0.05
    )
    assert f"of {NUM_STEPS} s" in page.locator(".range").first.inner_text()


def test_zoomed_lanes_show_the_part_that_they_name(page):
    found = stage(page)
    page.get_by_role("button", name="Next step").first.click()
    assert view(found) == pytest.approx((0, 1))
    page.get_by_role("button", name="Next step").first.click()
    assert view(found) == pytest.approx((1, 2))
    # A step fills the stage, so its stall is where the whole trace's fourth to sixth seconds were.
    seen = colours_at(found, [NUM_STEPS * 0.88, NUM_STEPS * 0.03], 17 + 24)
    assert seen == [STALL_COLOUR, SPAN_COLOURS["forward"]]
    page.get_by_role("button", name="Show everything").first.click()
    assert view(found) == (0, NUM_STEPS)


def test_keys_alone_zoom_pan_and_tell_of_every_span(page):
    found = stage(page)
    found.focus()
    page.keyboard.press("+")
    low, high = view(found)
    assert high - low == pytest.approx(0.6 * NUM_STEPS)
    page.keyboard.press("ArrowRight")
    assert view(found)[0] > low
    page.keyboard.press("0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    told = page.locator(".chosen-span").first
    assert "grads" in told.inner_text()
    assert "lane d2h, step 1" in told.inner_text()
    assert "3 MB moved, 10 MB/s" in told.inner_text()
    page.keyboard.press(".")
    assert "lane d2h, step 2" in told.inner_text()
    page.keyboard.press("Enter")
    low, high = view(found)
    assert (low, high) == pytest.approx((1.15, 1.75))


def test_timelines_on_one_scale_move_together_until_told_otherwise(page):
    box = page.locator("#linked")
    assert not box.is_checked()  # the profile's millisecond would not be seen beside six seconds
    box.check()
    first, second = stage(page, 0), page.locator(".stage").nth(1)
    first.focus()
    page.keyboard.press("+")
    assert view(first) == view(second)
    box.uncheck()
    first.focus()
    page.keyboard.press("+")
    assert view(first) != view(second)


def test_a_span_says_what_it_is_under_the_pointer(page):
    found = stage(page)
    box = found.bounding_box()
    page.mouse.move(box["x"] + box["width"] * (2.75 / NUM_STEPS), box["y"] + 25)
    tip = page.locator(".tip")
    assert tip.inner_text().splitlines() == [
        "stall:h2d", "lane device, step 3", "start 2.6 s, duration 300 ms",
    ]  # fmt: skip
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_a_sweep_is_sorted_filtered_and_mapped(page):
    table = page.locator("table.sortable")
    column = table.locator("th").all_inner_texts().index("step_seconds")
    head = table.get_by_role("button", name="step_seconds")

    def cells():
        rows = table.locator("tbody tr")
        return [rows.nth(n).locator("td").nth(column).inner_text() for n in range(rows.count())]

    head.click()
    values = [float(cell) for cell in cells() if cell]
    assert values == sorted(values)
    assert cells()[-1] == ""  # what does not fit has no time, and goes last either way
    head.click()
    values = [float(cell) for cell in cells() if cell]
    assert values == sorted(values, reverse=True)
    assert cells()[-1] == ""
    page.get_by_label("Show only rows").fill("h100")
    assert len(cells()) == 4
    heat = page.locator("svg.heat")
    page.get_by_label("across").select_option("S")
    page.get_by_label("up", exact=True).select_option("k")
    label = heat.get_attribute("aria-label")
    assert label.startswith("step_seconds by S and k")
    # The fastest of three machines in each cell: 1/2 + 0.1 and so on.
    assert {"0.6", "0.7", "0.2", "0.3"} <= set(heat.locator("text").all_text_contents())
    page.get_by_label("gpu held at").select_option("a100")
    assert {"1.1", "1.2", "0.3", "0.4"} <= set(heat.locator("text").all_text_contents())
    assert "each cell is one row" in heat.get_attribute("aria-label")


def test_a_decision_stands_with_what_was_predicted_and_measured(page):
    row = page.locator(".decisions tbody tr").inner_text()
    for text in ("S: 2 → 4", "1 s", "800 ms", "900 ms", "-11.1%", "20.0%", "<b>a bold reason</b>"):
        assert text in row
    # S over the steps, and predictions beside measurements, say what they are.
    labels = [chart.get_attribute("aria-label") for chart in page.locator("#tuning svg").all()]
    assert any(label.startswith("S over the run") for label in labels)
    assert any("predicted by the twin" in label for label in labels)


def test_it_reads_well_in_the_dark(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(background) != light
    colours = page.evaluate(
        """[...document.querySelectorAll("h2, .card, td, .keys, svg text")].map((node) => {
          const style = getComputedStyle(node);
          return node instanceof SVGElement ? style.fill : style.color;
        })"""
    )
    dark = [c for c in colours if max(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) < 110]
    # Only numbers on the bright cells of a heat map may be dark.
    assert len(dark) <= page.locator("svg.heat text").count()
    seen = colours_at(stage(page), [0.03, STALL[1] - 0.03], 17 + 24)
    assert seen == [SPAN_COLOURS["forward"], STALL_COLOUR]


def test_nothing_spills_over_a_narrow_window(page):
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
