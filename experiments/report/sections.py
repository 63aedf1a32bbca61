"""Sections of the page on runs, traces and sweeps: rows of tables, and charts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from bokeh.plotting import figure

from experiments.output.plots import SPAN_COLOURS, STALL_COLOUR, STRATEGY_COLOURS
from experiments.report import units
from experiments.report.charts import GREY, Line, around, bar_chart, line_chart
from experiments.report.runs import Run, curves
from experiments.report.trace_view import Lane, TraceView
from experiments.report.tuning import knobs_over_steps
from experiments.traces.facts import TraceFacts

Chart = tuple[str, str, figure]
"""Title, note and figure."""
KNOBS = {"update_interval": "S", "topk_ratio": "k", "select_interval": "selection"}
_WORK_COLOUR = "#4a90c4"
_SPARE_COLOURS = ("#1f77b4", "#a3762e", "#1795a5", "#a0655a", "#9467bd", "#5f7fb5")
_MOST_NAMES = 12
"""Most names of spans in the table of a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A row of the comparison: a run, or a trace that belongs to none."""

    name: str
    colour: str
    source: str
    """Kind of the side's numbers, such as measured or simulated."""
    work: str
    """Work of a step: steps of other work are not compared."""
    step: float | None
    stall: float | None
    down: float | None
    up: float | None
    run: Run | None = None

    @classmethod
    def of_run(cls, name: str, colour: str, run: Run) -> Side:
        """Return a run's row."""
        get = run.summary.get
        return cls(
            name=name, colour=colour, source=run.source, work=work(run.facts), run=run,
            step=get("mean_step_seconds"), stall=get("stall_fraction"),
            down=get("d2h_bytes_per_step"), up=get("h2d_bytes_per_step"),
        )  # fmt: skip

    @classmethod
    def of_trace(cls, name: str, view: TraceView) -> Side:
        """Return a trace's row."""
        return cls(
            name=name, colour=GREY, source=view.source, step=view.step_seconds,
            work=work(TraceFacts.read(view.metadata)), stall=view.stall_fraction,
            down=view.bytes_per_step.get("d2h"), up=view.bytes_per_step.get("h2d"),
        )  # fmt: skip


def work(facts: TraceFacts) -> str:
    """Return the work of a step in words, empty where nobody said."""
    return ", ".join(part for part in (facts.size, facts.batch) if part)


def run_colours(runs: Sequence[Run]) -> list[str]:
    """Return a colour for each run: its strategy's, unless an earlier run has that."""
    # Black can't be seen on a dark page.
    known, spare = {**STRATEGY_COLOURS, "on_device": GREY}, itertools.cycle(_SPARE_COLOURS)
    found: list[str] = []
    for run in runs:
        colour = known.get(run.name)
        found.append(next(spare) if colour is None or colour in found else colour)
    return found


# ---- comparison ---------------------------------------------------------------------------------


def speed(side: Side, sides: Sequence[Side]) -> float | None:
    """Return the speed, the slowest of its kind and work being 1; None if it is alone."""
    alike = [other.step for other in sides
             if other.step and (other.source, other.work) == (side.source, side.work)]  # fmt: skip
    return max(alike) / side.step if side.step and len(alike) > 1 else None


def comparison(sides: Sequence[Side]) -> list[Chart]:
    """Return charts of steps' times and bytes, of each work its own, and of losses."""
    groups: dict[str, list[Side]] = defaultdict(list)
    for side in sides:
        groups[side.work].append(side)
    found: list[Chart] = []
    for words, group in groups.items():
        # A bar alone says no more than the table.
        if len(group) > 1 or len(sides) == 1:
            note = f"Steps of {words}." if words and len(groups) > 1 else ""
            bars = _step_bars(f"step-{len(found)}", group)
            found += [(title, note, chart) for title, chart in bars]
    return found + _loss_charts([side for side in sides if side.run and side.run.rows])


def _step_bars(name: str, sides: Sequence[Side]) -> list[tuple[str, figure]]:
    found = []
    if timed := [side for side in sides if side.step]:
        stalls = [(side.step or 0) * (side.stall or 0) for side in timed]
        rest = [(side.step or 0) - stall for side, stall in zip(timed, stalls, strict=True)]
        rows = [(side.name, side.source,
                 f"{units.time(side.step, 3)}, {units.share(side.stall, 0)} stalled")
                for side in timed]  # fmt: skip
        parts = {"not stalled": (_WORK_COLOUR, rest), "stalled": (STALL_COLOUR, stalls)}
        found.append(("Time of a step", bar_chart(f"{name}-time", rows, parts, units.TIMES)))
    if moving := [side for side in sides if side.down is not None and side.up is not None]:
        down, up = [side.down or 0 for side in moving], [side.up or 0 for side in moving]
        rows = [(side.name, side.source, units.size(sum(moved)))
                for side, *moved in zip(moving, down, up, strict=True)]  # fmt: skip
        parts = {"to the host": (SPAN_COLOURS["grads"], down),
                 "to the device": (SPAN_COLOURS["params"], up)}  # fmt: skip
        chart = bar_chart(f"{name}-bytes", rows, parts, units.SIZES)
        found.append(("Bytes over the link in a step", chart))
    return found


def _loss_charts(sides: Sequence[Side]) -> list[Chart]:
    lines: dict[str, list[Line]] = defaultdict(list)
    charts, shown = [], []
    for side in sides:
        assert side.run is not None
        found = curves(side.run)
        losses = pd.Series(found["loss"], dtype=float)
        smooth = losses.ewm(span=max(9, len(losses) / 15)).mean().tolist()
        held = list(zip(*found["held_out"], strict=True)) or [(), (), ()]
        for place, against in enumerate(("step", "elapsed")):
            lines[against] += [
                Line(side.name, side.colour, found[against], smooth, "thin"),
                Line(side.name, side.colour, held[place], held[2], "dots"),
            ]
        # The first steps fall from ln(vocabulary); what differs between strategies comes after.
        shown += [*smooth[len(smooth) // 20 :], *held[2]]
    note = "Thin: training, a running mean. Dots: held-out. A click on a name hides it."
    for against, title, x in (("elapsed", "time", "seconds"), ("step", "steps", "step")):
        if sides:
            chart = line_chart(f"loss-{against}", lines[against], x=x, y="loss",
                               y_range=around(shown))  # fmt: skip
            charts.append((f"Loss against {title}", note, chart))
    return charts


def figures_by_name(lane: Lane) -> list[tuple[str, int, float, int]]:
    """Return name, spans, their seconds and bytes, the longest first; many names become one."""
    bars = pd.DataFrame(
        [(bar.name, 1, bar.busy_seconds, bar.num_bytes) for bar in lane.bars],
        columns=["name", "count", "seconds", "bytes"],
    )
    order = bars.groupby("name").sum().sort_values("seconds", ascending=False, kind="stable")
    rows = [(name, *row) for name, *row in order.itertuples()]
    shown, rest = rows[:_MOST_NAMES], order.iloc[_MOST_NAMES:]
    return shown + [(f"{len(rest)} other names", *rest.sum())] * bool(len(rest))


# ---- tuning -------------------------------------------------------------------------------------


def tuning_charts(name: str, side: Side) -> list[Chart]:
    """Return charts of the knobs that moved, and of predictions beside measurements."""
    assert side.run is not None
    assert side.run.story is not None
    story, rows, colour = side.run.story, side.run.rows, side.colour
    guides = [decision.step for decision in story.decisions]
    logged, windows = knobs_over_steps(story), story.windows
    last = max([row["step"] for row in rows] + [window.step for window in windows], default=0)
    # Zen-auto moves S between decisions of the log, so the steps' own record goes first.
    own = [(row["step"], row["update_interval"]) for row in rows if row.get("update_interval")]
    found = []
    for knob, label in KNOBS.items():
        points = [(step, knobs[knob]) for step, knobs in logged]
        if knob == "update_interval" or len({value for _, value in points}) > 1:
            points = own if own and knob == "update_interval" else points
            steps, values = zip(*points, (last, points[-1][1]), strict=True)
            line = Line(label, colour, steps, values, "steps")
            chart = line_chart(f"{name}-{knob}", [line], x="step", y=label, guides=guides,
                               height=230)  # fmt: skip
            found.append((f"{label} over the run", "", chart))
    if windows:
        steps = tuple(window.step for window in windows)
        lines = [
            Line("measured", colour, steps, [window.step_seconds for window in windows], "dots"),
            Line("of it stalled", STALL_COLOUR, steps,
                 [window.stall_seconds for window in windows], "dots"),
            Line("predicted by the twin", GREY, steps,
                 [window.predicted_step_seconds for window in windows], "dashed"),
        ]  # fmt: skip
        chart = line_chart(f"{name}-time", lines, x="step", y="seconds", guides=guides, height=230)
        found.append(("Step time: predicted against measured", "", chart))
    for _, _, chart in found:
        chart.y_range.start = 0
    return found


# ---- provenance ---------------------------------------------------------------------------------


def origin(trace: tuple[str, TraceView, TraceFacts]) -> tuple[str, Mapping[str, Any]]:
    """Return a trace's path and what it knows of its origin."""
    _, view, facts = trace
    where = f"{view.source}, {facts.machine}" if facts.machine else view.source
    return view.path, {"commit": facts.commit, "hardware": where}


def origins(records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[Any, ...]]:
    """Return paths, with the commit, hardware, versions and seed that they share."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, record in records:
        hardware, versions = record.get("hardware"), record.get("versions")
        if isinstance(hardware, Mapping):
            cores, memory = hardware.get("cores"), hardware.get("memory_bytes")
            told = (
                hardware.get("gpu"), hardware.get("cpu"), cores and units.plural(cores, "core"),
                memory and units.size(memory), hardware.get("system"),
            )  # fmt: skip
            hardware = ", ".join(str(part) for part in told if part)
        if isinstance(versions, Mapping):
            versions = ", ".join(f"{name} {version}" for name, version in versions.items())
        known = (record.get("commit"), hardware, versions, record.get("seed"))
        words = (units.MISSING if word in (None, "") else str(word) for word in known)
        groups[tuple(words)].append(path)
    return [(paths, *known) for known, paths in groups.items()]
