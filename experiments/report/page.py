"""The page: its words from a template, its charts from Bokeh, in one file that asks for no more.

What comes from files reaches the page as text that the template escapes, or as data of charts. A
content security policy allows the page's own scripts, by their hashes, and no connection at all.
Styles are allowed wherever they stand, because Bokeh writes its own into the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.plotting import figure
from bokeh.resources import Resources
from markupsafe import Markup

from experiments.report import sections, tuning, units
from experiments.report.charts import heat_chart
from experiments.report.decimation import decimate
from experiments.report.loading import Contents
from experiments.report.sections import Side
from experiments.report.timelines import LEGEND, time_unit, timeline_chart
from experiments.traces.facts import TraceFacts

ASSETS = Path(__file__).resolve().parent / "assets"
MOST_SPANS = 40_000
"""Most spans of all traces on one page: about 2 MB."""
_LEAST_SPANS = 2_000


def render(contents: Contents, *, title: str, made: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    Args:
        contents: What to show.
        title: Above it.
        made: Commit, versions, time and command of the page itself.
    """
    shown = page_data(contents, title=title, made=made)
    # After the library comes a line that sets how much it logs, which page.js does itself.
    scripts = [Resources(mode="inline", components=["bokeh"]).js_raw[0], _asset("page.js")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    formats = (units.digits, units.time, units.size, units.share, units.plural, units.cell)
    environment.filters |= {format.__name__: format for format in formats}
    return environment.get_template("page.html").render(
        **shown, sections=sections, tuning=tuning, time_unit=time_unit,
        known=lambda record: defaultdict(lambda: None, record or {}),
        # Ours, so not escaped.
        scripts=[Markup(script) for script in scripts], hashes=[_hash(text) for text in scripts],
        style=Markup(_asset("page.css")), data=Markup(_json_of(shown["charts"])),
    )  # fmt: skip


def page_data(contents: Contents, *, title: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the template shows."""
    names = unique_names([(run.name, run.path) for run in contents.runs])
    colours = sections.run_colours(contents.runs)
    runs = [Side.of_run(*run) for run in zip(names, colours, contents.runs, strict=True)]
    views = [(side.name, side.run.trace) for side in runs if side.run and side.run.trace]
    views += [(Path(view.path).name, view) for view in contents.traces]
    titles = unique_names([(name, view.path) for name, view in views])
    most = max(_LEAST_SPANS, MOST_SPANS // max(1, len(views)))
    timelines = []
    for place, (name, (_, view)) in enumerate(zip(titles, views, strict=True)):
        drawn = decimate(view, most)
        timelines.append((name, view, drawn, timeline_chart(f"timeline-{place}", view, drawn)))
    own = timelines[len(timelines) - len(contents.traces) :]
    traces = [(name, view, TraceFacts.read(view.metadata)) for name, view, *_ in own]
    sides = runs + [Side.of_trace(name, view) for name, view, _ in traces if view.step_seconds]
    compared = sections.comparison(sides)
    tuned = [(side, sections.tuning_charts(f"tuning-{place}", side))
             for place, side in enumerate(runs) if side.run and side.run.story]  # fmt: skip
    sweeps = [(table, heat_chart(f"heat-{place}") if table.axes[1:] and table.measures else None)
              for place, table in enumerate(contents.tables)]  # fmt: skip
    titled = [*compared, *(chart for _, charts in tuned for chart in charts)]
    charts = [chart for *_, chart in [*titled, *timelines]]
    charts += [chart for _, chart in sweeps if chart]
    records = [*contents.records, *map(sections.origin, traces), ("this page", made)]
    return {
        "title": title, "made": made, "notes": contents.notes, "runs": runs, "traces": traces,
        "sides": sides, "comparison": compared, "timelines": timelines, "legend": LEGEND,
        "tuned": tuned, "sweeps": sweeps, "origins": sections.origins(records), "charts": charts,
    }  # fmt: skip


def unique_names(named: Sequence[tuple[str, str]]) -> list[str]:
    """Return each name, with the part of its path that tells it from others of that name.

    >>> unique_names([("zenflow", "runs/a"), ("zenflow", "runs/b"), ("delayed", "runs/c")])
    ['zenflow (a)', 'zenflow (b)', 'delayed']
    """
    found = []
    for name, path in named:
        twins = [Path(other).parts for twin, other in named if twin == name]
        if len(twins) == 1:
            found.append(name)
            continue
        same = 0
        while len({parts[same : same + 1] for parts in twins}) == 1 and any(
            len(parts) > same for parts in twins
        ):
            same += 1
        rest = "/".join(Path(path).parts[same:]) or path
        found.append(f"{name} ({rest.removesuffix(f'/{name}')})")
    return found


def _json_of(charts: Sequence[figure]) -> str:
    """Return the JSON from which Bokeh draws each chart in the element of its name."""
    document = Document()
    with document.models.freeze():  # else Bokeh looks through all of them after each
        for chart in charts:
            document.add_root(chart)
    documents, _ = standalone_docs_json_and_render_items(charts, suppress_callback_warning=True)
    # One document has all charts; none has them on a page of tables alone.
    places = [{"docid": name, "roots": {chart.id: chart.name for chart in charts},
               "root_ids": [chart.id for chart in charts]} for name in documents]  # fmt: skip
    data = json.dumps({"documents": documents, "places": places}, allow_nan=False)
    # "<" could end the element that holds the data; as an escape it is the same JSON.
    return data.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
