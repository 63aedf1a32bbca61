"""The page: its data as JSON, its styles and scripts, in one file that asks for nothing more.

What comes from files reaches the page as data that scripts show as text, never as markup, and a
content security policy allows the page's own scripts, by their hashes, and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from experiments.report.decimation import DrawnTrace, decimate
from experiments.report.loading import Contents
from experiments.report.runs import Run, curves
from experiments.report.tables import Column, SweepTable
from experiments.report.trace_view import Bar, Lane, TraceView
from experiments.report.tuning import story_data
from experiments.traces.facts import TraceFacts

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("dom.js", "charts.js", "lanes.js", "timelines.js", "tables.js", "sections.js")
"""In the order in which they build on each other."""
MOST_SPANS = 60_000
"""Of all traces on one page: about 2 MB."""
_LEAST_SPANS = 2_000
_MOST_NAMES = 12
"""Of a lane's spans in the table of its figures."""
_NANO = 1e9
_SPARE_COLOURS = ("#1f77b4", "#bcbd22", "#17becf", "#8c564b", "#9467bd", "#2f4b7c")
_FIGURES = (
    "steps", "planned_steps", "run_seconds", "mean_step_seconds", "median_step_seconds",
    "p95_step_seconds", "stall_seconds", "stall_fraction", "d2h_bytes_per_step",
    "h2d_bytes_per_step", "captured_energy", "max_staleness", "final_train_loss",
    "tokens_per_second", "host_bytes_per_param", "eval_loss", "eval_accuracy", "num_params",
    "model", "data", "device", "dtype", "seed",
)  # fmt: skip
_ORIGINS = ("commit", "versions", "hardware")


def render(contents: Contents, *, title: str, made: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    Args:
        contents: What to show.
        title: Above it.
        made: Commit, versions, time and command of the page itself.
    """
    data = _strict(page_data(contents, title=title, made=made))
    # "<" could end the element that holds the data; as an escape it is the same JSON.
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();'
    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    frame = Template((ASSETS / "page.html").read_text(encoding="utf-8"))
    return frame.substitute(
        title=html.escape(title),
        script_hash=_hash(script),
        style_hash=_hash(style),
        style=style,
        script=script,
        data=encoded,
    )


def page_data(contents: Contents, *, title: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the page's scripts read: see each part below."""
    # Slow to load, and nothing before the page needs it.
    from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR, STRATEGY_COLOURS

    names = unique_names([(run.name, run.path) for run in contents.runs])
    views = [
        *((name, run.trace) for name, run in zip(names, contents.runs, strict=True) if run.trace),
        *((Path(view.path).name, view) for view in contents.traces),
    ]
    share = max(_LEAST_SPANS, MOST_SPANS // max(1, len(views)))
    titles = unique_names([(name, view.path) for name, view in views])
    timelines = [
        timeline_data(title, view, decimate(view, share))
        for title, (_, view) in zip(titles, views, strict=True)
    ]
    return {
        "title": title,
        "made": made,
        "notes": contents.notes,
        "runs": [run_data(name, run) for name, run in zip(names, contents.runs, strict=True)],
        "timelines": timelines,
        "traces": [_trace_figures(title, view) for title, (_, view) in
                   list(zip(titles, views, strict=True))[len(views) - len(contents.traces):]],
        "tables": [table_data(table) for table in contents.tables],
        "origins": [
            {"path": path, "seed": record.get("seed"), **{n: record.get(n) for n in _ORIGINS}}
            for path, record in contents.records
        ],
        "colours": {
            "stall": STALL_COLOUR,
            "spans": dict(SPAN_COLOURS),
            "runs": _run_colours(contents.runs, STRATEGY_COLOURS),
        },
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


def run_data(name: str, run: Run) -> dict[str, Any]:
    """Return a run's card, curves and tuning."""
    summary = run.summary
    interval = (summary.get("config") or {}).get("update_interval")
    return {
        "name": name,
        "path": run.path,
        "source": run.source,
        "work": _work(run.facts),
        "link": summary.get("emulated_link"),
        "figures": {key: summary.get(key) for key in _FIGURES},
        "interval": interval,
        "rule": summary.get("config") or {},
        "settings": run.settings,
        "curves": curves(run) if run.rows else None,
        "tuning": None if run.story is None else story_data(run.story),
    }


def timeline_data(name: str, view: TraceView, drawn: DrawnTrace) -> dict[str, Any]:
    """Return a trace for the page: times are whole nanoseconds, starts and steps differences.

    The lanes' figures are of all spans, whatever is drawn.
    """
    seconds = view.seconds or 1.0
    lanes = []
    for lane, blocks in zip(view.lanes, drawn.lanes, strict=True):
        names = list(dict.fromkeys(block.name for block in blocks))
        index = {name: place for place, name in enumerate(names)}
        starts = [round(block.start * _NANO) for block in blocks]
        steps = [block.step for block in blocks]
        columns = {
            "start": _differences(starts),
            "length": [
                round(block.end * _NANO) - start
                for block, start in zip(blocks, starts, strict=True)
            ],
            "name": [index[block.name] for block in blocks],
            "step": _differences(steps),
            "bytes": [block.num_bytes for block in blocks],
            "row": [block.row for block in blocks],
            "stall": [int(block.is_stall) for block in blocks],
            "count": [block.count for block in blocks],
            "busy": [
                round(block.busy_seconds * _NANO) if block.count > 1 else 0 for block in blocks
            ],
        }
        defaults = {"bytes": 0, "row": 0, "stall": 0, "count": 1, "busy": 0}
        lanes.append(
            {
                "name": lane.name,
                "names": names,
                "rows": max((block.row for block in blocks), default=0) + 1,
                "busy_seconds": lane.busy_seconds,
                "busy_share": lane.busy_seconds / seconds,
                "num_bytes": lane.num_bytes,
                "by_name": _by_name(lane),
                "columns": {
                    key: values for key, values in columns.items()
                    # A column that says nothing is left out.
                    if key not in defaults or any(value != defaults[key] for value in values)
                },
            }
        )  # fmt: skip
    return {
        "name": name,
        "path": view.path,
        "source": view.source,
        "seconds": view.seconds,
        "steps": [[step, start] for step, start in view.step_starts.items()],
        "num_spans": view.num_spans,
        "num_drawn": drawn.num_blocks,
        "num_hidden": drawn.num_hidden,
        "resolution": drawn.resolution,
        "lanes": lanes,
    }


def _by_name(lane: Lane) -> list[list[Any]]:
    """Return [name, spans, their seconds, bytes], the longest first; many names become one."""
    found: dict[str, list[Bar]] = {}
    for bar in lane.bars:
        found.setdefault(bar.name, []).append(bar)
    ordered = sorted(found.items(), key=lambda item: -sum(bar.seconds for bar in item[1]))
    shown, rest = ordered[:_MOST_NAMES], ordered[_MOST_NAMES:]
    if rest:
        others = [bar for _, bars in rest for bar in bars]
        shown.append((f"{len(rest)} other names", others))
    return [
        [name, len(bars), sum(bar.seconds for bar in bars), sum(bar.num_bytes for bar in bars)]
        for name, bars in shown
    ]


def table_data(table: SweepTable) -> dict[str, Any]:
    """Return a table for the page, column by column."""
    return {
        "path": table.path,
        "source": table.source,
        "question": table.question,
        "answer": table.answer,
        "num_rows": table.num_rows,
        "num_shown": table.num_shown,
        "constants": table.constants,
        "columns": [_column_data(column) for column in table.columns],
    }


def _column_data(column: Column) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": column.name, "number": column.is_number, "axis": column.is_axis,
        "meaning": column.meaning,
    }  # fmt: skip
    levels = list(dict.fromkeys(column.values))
    if not column.is_number and 2 * len(levels) < len(column.values):
        index = {value: place for place, value in enumerate(levels)}
        return data | {"levels": levels, "index": [index[value] for value in column.values]}
    return data | {"values": list(column.values)}


def _trace_figures(title: str, view: TraceView) -> dict[str, Any]:
    """Return what a trace that has no run tells for the comparison."""
    facts = TraceFacts.read(view.metadata)
    return {
        "name": title,
        "path": view.path,
        "source": view.source,
        "seconds": view.seconds,
        "num_steps": len(view.step_starts),
        "step_seconds": view.step_seconds,
        "stall_fraction": view.stall_fraction,
        "bytes_per_step": view.bytes_per_step,
        "work": _work(facts),
        "facts": facts.to_metadata(),
    }


def _work(facts: TraceFacts) -> str:
    """Return what a step computes: steps of other work are not compared."""
    return ", ".join(part for part in (facts.size, facts.batch) if part)


def _run_colours(runs: Sequence[Run], known: Mapping[str, str]) -> list[str]:
    """Return a colour for each run: its strategy's, unless an earlier run has that."""
    spare = itertools.cycle(_SPARE_COLOURS)
    found: list[str] = []
    for run in runs:
        colour = known.get(run.name)
        found.append(next(spare) if colour is None or colour in found else colour)
    return found


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _strict(value: Any) -> Any:
    """Return the value with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
