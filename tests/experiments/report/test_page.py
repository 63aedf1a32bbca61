"""The page of ``zenflow report`` in a real browser: what it shows, and what it does when used."""

import io
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
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

WINDOW = {"width": 1300, "height": 900}
DRAWN = """() => window.Bokeh && document.querySelectorAll(".chart").length ===
    [...Bokeh.index.roots].filter((view) => view.frame?.bbox.width > 0).length"""
EVIL = "<img src=x onerror='window.evil=1'> $$x^2$$ @step"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _browser_path(driver):
    """Return an installed Chromium: playwright's own, or the system's."""
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, _BROWSERS)]
    own = Path(driver.chromium.executable_path)
    return next((path for path in found if path), str(own) if own.is_file() else None)


@pytest.fixture(scope="module")
def browser():
    # Loaded here: all workers of a run collect this file, and one opens the page.
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with playwright.sync_playwright() as driver:
        path = _browser_path(driver)
        if path is None:
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        # A container has no user name spaces for the sandbox; the page is our own.
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def screenshot(page):
    from PIL import Image

    return Image.open(io.BytesIO(page.screenshot()))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A page of everything that a page can show, with names that try to be markup."""
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "cmp" / "zero_offload", "zero_offload", mean_step_seconds=2.0)
    write_run(folder / "cmp" / "zenflow", "zenflow")
    names = ["zero_offload", "zenflow"]
    (folder / "cmp" / "config.json").write_text(json.dumps({"compare": names}))
    write_decisions(write_run(folder / "tuned", "<script>window.evil = 1</script>"))
    evil = replace(timeline(source="simulated"), spans=tuple(
        replace(span, name=EVIL) if span.lane == "host" else span for span in timeline().spans
    ))  # fmt: skip
    evil.write(folder / "sim<img src=x onerror='window.evil=1'>.json")
    paths = [
        folder / "cmp", folder / "tuned", *folder.glob("sim*"),
        write_profile(folder / "profile.json"), write_sweep(folder / "sweep"),
    ]  # fmt: skip
    out = folder / "page.html"
    out.write_text(render(load(paths), title="<b>A report</b>", made={"command": "x", "at": "y"}))
    return out


@contextmanager
def opened(browser, path):
    """Open a page; nothing may go wrong on it and nothing may be asked for."""
    context = browser.new_context(viewport=WINDOW, color_scheme="light")
    context.set_default_timeout(20_000)
    shown = context.new_page()
    problems, asked = [], []
    shown.on("console", lambda said: problems.append(said.text))
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(path.as_uri())
    shown.wait_for_function(DRAWN)
    yield shown
    context.close()
    assert problems == []
    assert asked == [path.as_uri()]


@pytest.fixture(scope="module")
def used_page(browser, path):
    with opened(browser, path) as shown:
        yield shown


@pytest.fixture
def page(used_page):
    """The page, to use: its first lanes show the whole run."""
    return first_lanes_whole(used_page)


@pytest.fixture(scope="module")
def still(browser, path):
    """The page for all tests that only look at it."""
    with opened(browser, path) as shown:
        yield shown


@pytest.fixture(scope="module")
def short_path(tmp_path_factory):
    """The page of one run, which loads sooner."""
    folder = tmp_path_factory.mktemp("one")
    out = folder / "page.html"
    contents = load([write_run(folder / "run")])
    out.write_text(render(contents, title="x", made={"command": "x", "at": "y"}))
    return out


@pytest.fixture(scope="module")
def short_page(browser, short_path):
    with opened(browser, short_path) as shown:
        yield shown


@pytest.fixture
def one_run(short_page):
    """The page of one run, to use: its lanes show the whole run."""
    return first_lanes_whole(short_page)


def first_lanes_whole(shown):
    """Undo what an earlier test has done to the view."""
    shown.evaluate("scrollTo(0, 0)")
    shown.locator(".timeline [title='Reset']").first.press("Enter")
    return shown


class Lanes:
    """A timeline on the page, by its place."""

    def __init__(self, page, place=0):
        self.page, self.name = page, f"timeline-{place}"
        self.card = page.locator(".timeline").nth(place)
        self.card.scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # to be painted

    @property
    def view(self):
        """Seconds at the edges."""
        ends = "(name) => { const { x_range: r } = Bokeh.documents[0].get_model_by_name(name);"
        found = self.page.evaluate(f"{ends} return [r.start, r.end]; }}", self.name)
        return tuple(end * float(self.card.get_attribute("data-unit")) for end in found)

    @property
    def frame(self):
        """Left, top, width and height of where the bars are, on the screen."""
        script = """(name) => {
            const view = [...Bokeh.index.roots].find((one) => one.model.name === name);
            const { x, y } = view.el.getBoundingClientRect();
            const { left, top, width, height } = view.frame.bbox;
            return [x + left, y + top, width, height]; }"""
        return self.page.evaluate(script, self.name)

    def at(self, share, down):
        """Return a place on the screen: a share of the width, and pixels from the top."""
        left, top, width, _ = self.frame
        return left + share * width, top + down

    def colours_at(self, shares, down):
        image = screenshot(self.page).convert("RGB")
        places = [self.at(share, down) for share in shares]
        return ["#" + bytes(image.getpixel((int(x), int(y)))).hex() for x, y in places]


DEVICE, D2H, HOST = 14, 14 + 35, 14 + 3 * 35
"""Pixels from the frame's top to the middle of these lanes."""


def chart_data(page, name, renderer=0):
    """Return the columns from which a chart is drawn."""
    script = """([name, place]) => {
        const { data } = Bokeh.documents[0].get_model_by_name(name).renderers[place].data_source;
        const columns = data instanceof Map ? [...data] : Object.entries(data);
        return Object.fromEntries(columns.map(([key, column]) => [key, [...column]])); }"""
    return page.evaluate(script, [name, renderer])


def test_every_section_shows_what_it_is_of(still):
    assert still.locator("h2").all_inner_texts() == [
        "Summary", "Side by side", "Timelines", "Tuning", "Sweeps", "Provenance",
    ]  # fmt: skip
    cards = still.locator(".card.run").all_inner_texts()
    assert len(cards) == 6
    assert "zero_offload" in cards[0]
    assert "2 s" in cards[0]
    assert "30.0% stalled" in cards[0]
    assert still.locator(".badge", has_text="simulated").count() == 2  # its card, its lanes
    assert "c0ffee" in still.locator("#provenance").inner_text()
    assert "What helps most?" in still.locator("#sweeps").inner_text()
    assert "deadbeef" in still.locator("#provenance").inner_text()


def test_speeds_are_ranked_among_runs_of_the_same_work_alone(browser, tmp_path):
    for name, params, seconds in (("a", 1_000_000, 1.0), ("b", 1_000_000, 2.0), ("c", 7, 12.0)):
        write_run(tmp_path / name, name, num_params=params, mean_step_seconds=seconds)
    out = tmp_path / "page.html"
    made = {"command": "x", "at": "y"}
    out.write_text(render(load([tmp_path / n for n in "abc"]), title="x", made=made))
    shown = browser.new_page()
    shown.goto(out.as_uri())
    rows = shown.locator("#comparison tr").all_inner_texts()
    place = rows[0].split("\t").index("speed, slowest of its kind and work = 1")
    cells = {row.split("\t")[0]: row.split("\t") for row in rows[1:]}
    assert {name: row[place] for name, row in cells.items()} == {
        "a": "2\u00d7", "b": "1\u00d7", "c": "\u2013",
    }  # fmt: skip
    assert "1M parameters" in cells["a"][2]
    shown.close()


def test_a_page_of_one_run_has_what_it_needs_alone(one_run):
    titles = ["Summary", "The run", "Timelines", "Provenance"]
    assert one_run.locator("h2").all_inner_texts() == titles
    assert one_run.locator(".timeline output").inner_text() == f"0 to {NUM_STEPS} of {NUM_STEPS} s"
    assert one_run.locator("#linked").count() == 0


def test_names_are_text_and_never_run(still):
    assert still.locator("h1").inner_text() == "<b>A report</b>"
    assert "<script>window.evil" in still.locator("#summary").inner_text()
    # In what the library draws too: a span's name under the pointer is as it was.
    lanes = Lanes(still, 3)
    still.mouse.move(*lanes.at(0.65 / NUM_STEPS, HOST))
    tip = still.locator(".bk-tooltip-content:visible")
    tip.wait_for()
    assert EVIL in tip.inner_text()
    assert still.locator("img").count() == 0  # shadow roots are looked through
    assert still.locator("b").count() == 0  # a decision's reason is bold in its file alone
    assert still.evaluate("window.evil") is None


def test_injected_scripts_are_refused(browser, short_path, tmp_path):
    """Even if markup came through, the page's policy would not run it."""
    evil = tmp_path / "evil.html"
    text = short_path.read_text().replace("</body>", "<script>window.evil = 1</script></body>")
    evil.write_text(text)
    shown = browser.new_page()
    shown.goto(evil.as_uri())
    assert shown.evaluate("window.evil") is None
    assert shown.evaluate("typeof Bokeh") == "object"
    shown.close()


def test_lanes_are_named_and_drawn_in_the_colours_of_their_spans(still):
    lanes = Lanes(still)
    label = lanes.card.locator(".chart").get_attribute("aria-label")
    assert label == "Timeline of zero_offload: device, d2h, h2d, host"
    steps = range(NUM_STEPS)
    for offset, colour in (
        (0.03, SPAN_COLOURS["forward"]), (0.57, SPAN_COLOURS["backward"]),
        (STALL[1] - 0.03, STALL_COLOUR), (0.95, SPAN_COLOURS["step"]),
    ):  # fmt: skip
        seen = lanes.colours_at([(step + offset) / NUM_STEPS for step in steps], DEVICE)
        assert seen == [colour] * NUM_STEPS, offset
    shares = [(step + offset) / NUM_STEPS for step in steps for offset in (0.1, 0.5)]
    copies = lanes.colours_at(shares, D2H)
    assert copies[1::2] == [SPAN_COLOURS["grads"]] * NUM_STEPS
    assert SPAN_COLOURS["grads"] not in copies[::2]  # the link is idle there


def test_ctrl_and_the_wheel_zoom_about_the_pointer_and_drag_pans(one_run):
    lanes = Lanes(one_run)
    assert lanes.view == (0, NUM_STEPS)
    x, y = lanes.at(0.25, DEVICE)
    one_run.mouse.move(x, y)
    one_run.keyboard.down("Control")
    one_run.mouse.wheel(0, -400)
    one_run.keyboard.up("Control")
    one_run.wait_for_timeout(200)
    low, high = lanes.view
    assert high - low < 0.8 * NUM_STEPS
    # What is a quarter of the way along stays there.
    assert low + (high - low) / 4 == pytest.approx(NUM_STEPS / 4, abs=0.02)
    one_run.mouse.down()
    one_run.mouse.move(x - 100, y, steps=4)
    one_run.mouse.up()
    moved, _ = lanes.view
    assert moved - low == pytest.approx(100 / lanes.frame[2] * (high - low), rel=0.05)
    assert f"of {NUM_STEPS} s" in lanes.card.locator("output").inner_text()


def test_the_wheel_alone_scrolls_the_page_past_the_lanes(one_run):
    lanes = Lanes(one_run)
    before = one_run.evaluate("scrollY")
    one_run.mouse.move(*lanes.at(0.5, DEVICE))
    one_run.mouse.wheel(0, 120)
    one_run.wait_for_timeout(300)
    assert one_run.evaluate("scrollY") > before
    assert lanes.view == (0, NUM_STEPS)


def test_buttons_show_a_step_and_the_lanes_show_what_they_name(one_run):
    lanes = Lanes(one_run)
    following = lanes.card.get_by_role("button", name="next step")
    following.click()
    assert lanes.view == pytest.approx((0, 1))
    following.click()
    assert lanes.view == pytest.approx((1, 2))
    one_run.wait_for_timeout(200)
    assert lanes.colours_at([0.88, 0.03], DEVICE) == [STALL_COLOUR, SPAN_COLOURS["forward"]]
    lanes.card.get_by_role("button", name="step before").click()
    assert lanes.view == pytest.approx((0, 1))


def test_keys_alone_zoom_and_go_back_to_the_whole(one_run):
    lanes = Lanes(one_run)
    lanes.card.locator("[title='Zoom In (x-axis)']").press("Enter")
    low, high = lanes.view
    assert high - low < NUM_STEPS
    lanes.card.locator("[title='Reset']").press("Enter")
    assert lanes.view == (0, NUM_STEPS)


def test_timelines_on_one_scale_move_together_until_told_otherwise(page):
    box = page.locator("#linked")
    assert not box.is_checked()  # the profile's millisecond would not be seen beside six seconds
    box.check()
    first, profile = Lanes(page), Lanes(page, 4)
    step = first.card.get_by_role("button", name="next step")
    step.click()
    assert profile.view == pytest.approx(first.view) == (0, 1)
    box.uncheck()
    assert profile.view == pytest.approx((0, 1e-3))
    step.click()
    assert profile.view == pytest.approx((0, 1e-3))


def test_a_span_says_what_it_is_under_the_pointer(still):
    lanes = Lanes(still)
    tips = still.locator(".bk-tooltip-content:visible")
    still.mouse.move(*lanes.at(2.75 / NUM_STEPS, DEVICE))
    tips.first.wait_for()
    told = " ".join(" ".join(tips.all_inner_texts()).split())
    for words in ("stall:h2d", "lane: device", "step: 3", "start: 2.6 s", "busy: 0.3 s"):
        assert words in told, told
    still.mouse.move(*lanes.at(2.5 / NUM_STEPS, D2H))
    still.wait_for_timeout(200)
    told = " ".join(" ".join(tips.all_inner_texts()).split())
    assert "moved: 3 MB, 10 MB/s" in told
    still.mouse.move(5, 5)
    still.wait_for_timeout(200)
    assert tips.count() == 0


def test_a_sweep_is_sorted_filtered_and_mapped(page):
    table = page.locator("#sweeps table")
    column = table.locator("th").all_inner_texts().index("step_seconds")
    head = table.locator("th", has_text="step_seconds")

    def cells():
        rows = table.locator("tbody tr:visible")
        return [rows.nth(n).locator("td").nth(column).inner_text() for n in range(rows.count())]

    head.click()
    values = [float(cell) for cell in cells() if cell]
    assert values == sorted(values)
    assert cells()[-1] == ""  # what does not fit has no time, and goes last either way
    head.press("Enter")
    values = [float(cell) for cell in cells() if cell]
    assert values == sorted(values, reverse=True)
    assert cells()[-1] == ""
    page.get_by_label("Show only rows").fill("h100")
    assert len(cells()) == 4
    page.get_by_label("across").select_option("S")
    page.get_by_label("up", exact=True).select_option("k")

    def mapped():
        found = chart_data(page, "heat-0")
        places = zip(found["x"], found["y"], strict=True)
        return dict(zip(places, found["text"], strict=True))

    # The fastest of three machines in each cell: 1/2 + 0.1 and so on.
    fastest = {
        ("2", "0.1"): "0.6",
        ("2", "0.2"): "0.7",
        ("10", "0.1"): "0.2",
        ("10", "0.2"): "0.3",
    }
    assert mapped() == fastest
    told = page.locator(".told")
    assert told.inner_text() == "step_seconds by S and k: each cell is the least of up to 3 rows."
    page.get_by_label("gpu held at").select_option("a100")
    assert sorted(mapped().values()) == ["0.3", "0.4", "1.1", "1.2"]
    assert "each cell is one row" in told.inner_text()


def test_a_long_table_is_shown_from_its_start_until_more_is_asked_for(browser, tmp_path):
    rows = "".join(f"{n % 3},{n}\n" for n in range(1, 301))
    (tmp_path / "table.csv").write_text("a,b\n" + rows)
    out = tmp_path / "page.html"
    out.write_text(render(load([tmp_path]), title="x", made={"command": "x", "at": "y"}))
    with opened(browser, out) as shown:
        told, visible = shown.locator(".rows output"), shown.locator("#sweeps tbody tr:visible")
        assert (told.inner_text(), visible.count()) == ("200 of 300 rows", 200)
        for _ in range(2):
            shown.locator("#sweeps th", has_text="b").click()
        assert visible.first.inner_text().split() == ["0", "300"]  # which was hidden
        assert visible.count() == 200
        shown.get_by_role("button", name="more rows").click()
        assert (told.inner_text(), visible.count()) == ("300 of 300 rows", 300)


def test_a_decision_stands_with_what_was_predicted_and_measured(still):
    row = still.locator(".decisions tbody tr").inner_text()
    for text in ("S: 2 → 4", "1 s", "800 ms", "900 ms", "-11.1%", "20.0%", "<b>a bold reason</b>"):
        assert text in row
    titles = still.locator("#tuning figcaption").all_inner_texts()
    assert titles == ["S over the run", "Step time: predicted against measured"]
    name = still.locator("#tuning .chart").nth(1).get_attribute("id")
    # Each line has its points drawn too: measured, of it stalled, predicted.
    measured, _, _, _, predicted, _ = (chart_data(still, name, place)["y"] for place in range(6))
    assert measured == [1.0, 0.9]
    assert predicted[1] == 0.8


def test_it_reads_well_in_the_dark(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(background) != light
    colours = page.evaluate(
        """[...document.querySelectorAll("h1, h2, h3, figcaption, td, th, .soft, .badge, button")]
        .map((node) => getComputedStyle(node).color)"""
    )
    dark = [c for c in colours if max(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) < 110]
    assert dark == []
    lanes = Lanes(page)
    shares = [0.03 / NUM_STEPS, (STALL[1] - 0.03) / NUM_STEPS]
    assert lanes.colours_at(shares, DEVICE) == [SPAN_COLOURS["forward"], STALL_COLOUR]
    # Charts have the page's dark behind them, and their labels are light on it.
    left, top, _, height = map(int, lanes.frame)
    pixels = np.asarray(screenshot(page).convert("L"))
    labels = pixels[top : top + height, left - 55 : left - 4]
    assert np.median(labels) < 60
    assert labels.max() > 110


def test_nothing_spills_over_a_narrow_window(still):
    still.set_viewport_size({"width": 420, "height": 800})
    still.wait_for_timeout(300)
    assert still.evaluate("document.documentElement.scrollWidth") <= 420
    still.set_viewport_size(WINDOW)
