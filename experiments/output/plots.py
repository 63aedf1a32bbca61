"""Pictures of runs: functions from records to figures; nothing here measures.

Lanes and colours are the same in every picture; red is always the device waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.output.files import replacing
from experiments.output.run_types import RunSummary, StepRow, TimedSummary
from zenflow.trace.timeline import LANES, Timeline

STALL_COLOUR = "#d62728"
SPAN_COLOURS: Mapping[str, str] = {
    "forward": "#a6cee3",
    "backward": "#4a90c4",
    "step": "#7f8c99",
    "grads": "#f0a83c",
    "params": "#58a55c",
    "accumulate": "#cab2d6",
    "adam": "#8e63b0",
    "save": "#c9c27a",
}
STRATEGY_COLOURS: Mapping[str, str] = {
    "on_device": "#444444",
    "zero_offload": "#d95f02",
    "delayed": "#b8860b",
    "zenflow_paper": "#7570b3",
    "zenflow": "#1b9e77",
    "auto": "#e7298a",
    "zen-auto": "#e7298a",
}
_OTHER_COLOUR = "#bbbbbb"
_BAR_HEIGHT = 0.72
_MOST_STEPS = 12
_MARGIN = 0.03
"""Share of an axis that lies beyond its last point, so that the point's mark is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Data of one run that a comparison draws, read from the run's files."""

    strategy: str
    summary: RunSummary
    rows: Sequence[StepRow]
    """The lines of steps.jsonl."""
    timeline: Timeline


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture, whole or not at all."""
    # Without a date the same picture is the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    FigureCanvasAgg(figure)
    with replacing(path) as draft:
        kind = path.suffix.removeprefix(".") or None
        figure.savefig(draft, format=kind, dpi=130, metadata=metadata)


def draw_timeline(timeline: Timeline, summary: TimedSummary) -> Figure:
    """Return the four lanes over the last few windows of one run."""
    stalled = summary["stall_fraction"] or 0.0
    title = (
        f"{summary['strategy']}: {summary['mean_step_seconds'] * 1e3:.0f} ms per step, "
        f"{stalled:.0%} of the run stalled"
    )
    return draw_steps(timeline, title + _link_note(summary), _window_steps(summary))


def draw_steps(timeline: Timeline, title: str, num_steps: int = 8) -> Figure:
    """Return the four lanes over the last steps of any timeline, measured or simulated."""
    shown = last_steps(timeline, num_steps)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots()
    draw_lanes(axes, shown)
    mark_steps(axes, shown)
    axes.set_xlim(0, shown.makespan)
    axes.set_xlabel("seconds")
    figure.suptitle(title, fontsize=12)
    lane_legend(figure, [shown])
    return figure


def draw_comparison(runs: Sequence[RunRecord], num_steps: int = 8) -> Figure:
    """Return every run's lanes over as many steps on one scale, and losses and stall below."""
    figure = Figure(figsize=(13, 2.1 * len(runs) + 5.2), layout="constrained")
    halves = figure.subfigures(2, 1, height_ratios=[2.1 * len(runs), 4.2], squeeze=False)
    top, bottom = halves[:, 0]
    cut = [last_steps(run.timeline, num_steps) for run in runs]
    widest = max(timeline.makespan for timeline in cut)
    panels = top.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run, timeline in zip(panels, runs, cut, strict=True):
        draw_lanes(axes, timeline)
        mark_steps(axes, timeline)
        axes.set_xlim(0, widest)
        per_step = timeline.makespan / num_steps * 1e3
        stalled = sum(timeline.stalls().values()) / timeline.makespan
        axes.set_title(
            f"{run.strategy}: {per_step:.0f} ms per step here, {stalled:.0%} of it stalled",
            loc="left", fontsize=10, pad=14,
        )  # fmt: skip
    panels[-1].set_xlabel(f"seconds from the start of the last {num_steps} steps")
    lane_legend(top, cut)
    left, middle, right = bottom.subplots(1, 3)
    _draw_losses(left, runs, "step")
    _draw_losses(middle, runs, "seconds")
    _draw_stall_shares(right, runs)
    first = runs[0].summary
    figure.suptitle(
        f"{first['num_params'] / 1e6:.1f}M parameters ({_short(first['model'])}) on "
        f"{first['data']}, seed {first['seed']}"
        f"{_link_note(first)}",
        fontsize=12,
    )
    return figure


def last_steps(timeline: Timeline, num_steps: int) -> Timeline:
    """Return everything that happened during the last whole steps, times counted from 0.

    A step reaches from the first device span that it caused to the next step's.
    """
    starts = _step_starts(timeline)
    if not starts:
        return timeline
    chosen = sorted(starts)[-num_steps:]
    end = max(span.end for span in timeline.spans if span.lane == "device")
    return timeline.between(starts[chosen[0]], end)


def _step_starts(timeline: Timeline) -> dict[int, float]:
    starts: dict[int, float] = {}
    for span in timeline.spans:
        if span.lane == "device":
            starts[span.step] = min(span.start, starts.get(span.step, span.start))
    return starts


def _window_steps(summary: Mapping[str, Any]) -> int:
    """Return how many steps to show: whole windows, two at least and 4 steps at least."""
    window = int(summary["config"]["update_interval"])
    return max(window * max(2, _MOST_STEPS // window) if window <= _MOST_STEPS else window, 4)


def draw_lanes(axes: Axes, timeline: Timeline) -> None:
    """Draw all lanes of a timeline, from its start on."""
    rows = {lane: float(row) for row, lane in enumerate(LANES)}
    draw_spans(axes, timeline, timeline.start, rows, SPAN_COLOURS, _BAR_HEIGHT)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_ylim(len(LANES) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_spans(
    axes: Axes,
    timeline: Timeline,
    origin: float,
    rows: Mapping[str, float],
    colours: Mapping[str, str],
    height: float,
) -> None:
    """Draw the spans of the lanes that have a row, times counted from an origin.

    Args:
        axes: Of the picture.
        timeline: The spans.
        origin: Seconds on the timeline's clock.
        rows: Middle of each lane's row.
        colours: Of spans by name; stalls are red.
        height: Of a row's bars.
    """
    bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        if span.lane in rows:
            colour = STALL_COLOUR if span.is_stall else colours.get(span.name, _OTHER_COLOUR)
            bars[span.lane, colour].append((span.start - origin, span.seconds))
    # Waits lie inside forward and step spans, so they are drawn over them.
    for lane, colour in sorted(bars, key=lambda key: key[1] == STALL_COLOUR):
        axes.broken_barh(
            bars[lane, colour], (rows[lane] - height / 2, height), facecolor=colour, linewidth=0
        )


def mark_steps(axes: Axes, timeline: Timeline) -> None:
    """Draw a line where a step starts, with its number above."""
    starts = _step_starts(timeline)
    room = timeline.makespan / 200
    for step, start in starts.items():
        axes.axvline(start - timeline.start, color="#999999", linewidth=0.6, zorder=0)
        axes.text(
            start - timeline.start + room, -0.6, f"{step}", fontsize=7, color="#666666",
            va="bottom",
        )  # fmt: skip


def lane_legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    """Name the colours of all spans that timelines have."""
    names = {span.name for line in timelines for span in line.spans if not span.is_stall}
    colour_legend(figure, {name: SPAN_COLOURS[name] for name in SPAN_COLOURS if name in names})


def colour_legend(figure: Any, colours: Mapping[str, str], stall: str = "stall") -> None:
    """Name the colours of spans below a figure, and what red is called."""
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    patches.append(Patch(color=STALL_COLOUR, label=stall))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(len(patches), 12), fontsize=8,
        frameon=False,
    )  # fmt: skip


def _draw_losses(axes: Axes, runs: Sequence[RunRecord], against: str) -> None:
    held_out = []
    for run in runs:
        colour = STRATEGY_COLOURS.get(run.strategy, _OTHER_COLOUR)
        at = _positions(run.rows, against)
        finite = [(p, x) for p, row in zip(at, run.rows, strict=True)
                  if (x := row["loss"]) is not None]  # fmt: skip
        axes.plot([p for p, _ in finite], smoothed([x for _, x in finite]), color=colour,
                  linewidth=1, alpha=0.5)  # fmt: skip
        points = [
            (place, loss)
            for place, row in zip(at, run.rows, strict=True)
            if (loss := row.get("eval_loss")) is not None
        ]
        last = run.summary.get("eval_loss")
        if last is not None and at:
            points.append((at[-1], last))
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3,
                  linewidth=1.5, label=run.strategy)  # fmt: skip
        held_out += [loss for _, loss in points]
    # The first steps fall from ln(vocabulary): what differs between strategies comes after. In a
    # short run held-out losses may still lie above those steps, and they are what is compared.
    early = [
        loss
        for run in runs
        if run.rows and (loss := run.rows[len(run.rows) // 20]["loss"]) is not None
    ]
    top = max(early + held_out)
    axes.set_ylim(top=top + _MARGIN * (top - axes.get_ylim()[0]))
    axes.set_xlabel("step" if against == "step" else "training seconds")
    axes.set_ylabel("loss (line: training, dots: held-out)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _positions(rows: Sequence[StepRow], against: str) -> list[float]:
    if against == "step":
        return [row["step"] for row in rows]
    positions, elapsed = [], 0.0
    for row in rows:
        elapsed += row["seconds"]
        positions.append(elapsed)
    return positions


def smoothed(values: Sequence[float]) -> list[float]:
    """Return a running mean over about a thirtieth of the run, and 5 steps at least."""
    weight = 1 - 1 / max(5.0, len(values) / 30)
    smooth: list[float] = []
    for count, value in enumerate(values):
        past = min(weight, count / (count + 1))
        smooth.append(value if not smooth else past * smooth[-1] + (1 - past) * value)
    return smooth


def _draw_stall_shares(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """Draw each run's mean step, its stalled part in red."""
    for place, run in enumerate(runs):
        step = run.summary["mean_step_seconds"] * 1e3
        share = run.summary["stall_fraction"] or 0.0
        axes.barh(place, step * (1 - share), color=SPAN_COLOURS["backward"], height=0.6)
        axes.barh(place, step * share, left=step * (1 - share), color=STALL_COLOUR, height=0.6)
        axes.text(step, place, f" {share:.0%} stalled", va="center", fontsize=8)
    axes.set_yticks(range(len(runs)), [run.strategy for run in runs])
    axes.invert_yaxis()
    axes.set_xlabel("mean step, ms (red: stalled)")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)
    axes.spines[["top", "right"]].set_visible(False)


def _short(model: str) -> str:
    """Return a model's name; a run's export is called by the run."""
    path = Path(model.removeprefix("own:"))
    return path.parent.name if path.name == "model" else path.name


def _link_note(summary: Mapping[str, Any]) -> str:
    link = summary.get("emulated_link")
    if not link:
        return ""
    down, up = (link[f"{way}_bytes_per_second"] / 1e6 for way in ("d2h", "h2d"))
    return f" (emulated link: {down:.3g} MB/s d2h, {up:.3g} MB/s h2d)"
