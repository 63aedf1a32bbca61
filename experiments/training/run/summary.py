"""summary.json: a run's figures, computed from its log alone; and the pictures beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from experiments.output.files import write_json
from experiments.output.provenance import percentile
from experiments.output.run_types import Evaluation, RunSummary, StepFigures, StepRow
from experiments.traces.facts import TraceFacts
from experiments.training.parts.files.step_log import read_steps
from zenflow.provenance import provenance
from zenflow.trace.ranks import write_ranks

if TYPE_CHECKING:
    from autotune.online.tuning import Tuning
    from experiments.training.parts.setup import RunSetup
    from zenflow.optimizer import ZenFlowAdamW
    from zenflow.report import MemoryPlan
    from zenflow.trace.timeline import Timeline

LAST_LOSSES = 10
"""Steps over which the final training loss is a mean: one batch's loss is mostly noise."""


def summarize(
    setup: RunSetup,
    optimizer: ZenFlowAdamW,
    memory: MemoryPlan,
    folder: Path,
    evaluation: Evaluation,
    *,
    tuning: Tuning | None = None,
) -> RunSummary:
    """Return the run's summary from its settings, memory, steps.jsonl and last evaluation."""
    rows = read_steps(folder / "steps.jsonl")
    link = setup.settings.link
    interval, unsettled = setup.config.update_interval, setup.config.full_warm_up_rounds
    tuned: dict[str, Any] | None = None
    if tuning is not None:
        tuned = tuning.summary(optimizer, sum(row["seconds"] for row in rows))
        interval = tuned["knobs"]["update_interval"]
        unsettled = max(unsettled, tuned["last_decision_step"])
    return {
        "strategy": setup.settings.label,
        "config": setup.config.to_dict(),
        "emulated_link": None
        if link is None
        else {"d2h_bytes_per_second": link[0], "h2d_bytes_per_second": link[1]},
        "num_params": memory.num_params,
        "model_bytes": memory.model_bytes,
        **step_figures(rows, interval, unsettled),
        "tuning": tuned,
        "host_bytes_per_param": memory.host_bytes_per_param,
        "device_bytes_extra": memory.device_extra_bytes,
        "eval_loss": None,
        **evaluation,
        "planned_steps": setup.total_steps,
        "model": setup.settings.model,
        "data": setup.data.name,
        "device": str(setup.device),
        "dtype": setup.settings.dtype,
        "seed": setup.settings.seed,
        "ranks": setup.ranks.count,
        **provenance(),
    }


def over_ranks(plans: Sequence[MemoryPlan], parallel: str | None) -> MemoryPlan:
    """Return the memory of all ranks together; parameters that each has whole count once.

    Which cores each rank has is told where they are bound
    (`experiments.training.parts.ranks.cores`).
    """
    total: dict[str, Any] = {name: sum(getattr(plan, name) for plan in plans) for name in _ADDED}
    if parallel == "fsdp":
        total |= {name: sum(getattr(plan, name) for plan in plans) for name in _OF_MODEL}
    if len(plans) > 1:  # on machines that number their processors alike
        total |= {"host_cores": (), "host_nodes": ()}
    return replace(plans[0], **total)


_ADDED = (
    "host_bytes", "pinned_bytes", "device_extra_bytes", "device_ring_bytes", "device_step_bytes",
    "host_threads",
)  # fmt: skip
_OF_MODEL = ("num_params", "split_params", "model_bytes")


def described(timeline: Timeline, setup: RunSetup, summary: RunSummary) -> Timeline:
    """Return the run's timeline with what it is of, which a trace file has to say by itself."""
    settings, machine = setup.settings, summary["hardware"]
    facts = TraceFacts(
        strategy=summary["strategy"],
        model=settings.model,
        num_params=summary["num_params"],
        batch_size=settings.batch_size,
        sequence=settings.sequence,
        grad_accum=settings.grad_accum,
        machine=machine["gpu"] if setup.device.type == "cuda" else machine["cpu"],
        commit=summary["commit"],
    )
    return replace(timeline, metadata={**timeline.metadata, **facts.to_metadata()})


def write_results(
    folder: Path, summary: RunSummary, timelines: Sequence[Timeline], tuning: Tuning | None
) -> str | None:
    """Write summary.json, the trace and the pictures of a run.

    Args:
        folder: Of the run.
        summary: What ``summarize`` returned.
        timelines: Of its last steps, ``described``; one of each rank.
        tuning: Of a tuned run that has taken all its steps.

    Returns:
        What a tuned run's user should know of its predictions; None where they were near.
    """
    # Imported late: drawing is slow to load, and no business of the loop.
    from experiments.output.plots import draw_timeline, save_figure
    from experiments.training.run.tuned.picture import draw_tuning, missed_predictions, read_tuning

    missed = None
    write_json(folder / "summary.json", summary)
    if tuning is not None and tuning.log is not None:
        series = read_tuning(folder)
        save_figure(draw_tuning(series), folder / "tuning.png")
        missed = missed_predictions(series)
    if timelines[0].spans:
        write_ranks(timelines, folder / "trace.json")
        save_figure(draw_timeline(timelines[0], summary), folder / "timeline.png")
    return missed


def step_figures(rows: Sequence[StepRow], update_interval: int, unsettled: int) -> StepFigures:
    """Return time, stall, bytes and loss of the log's rows; NaN without rows.

    Args:
        rows: Of every step.
        update_interval: S at the end of the run.
        unsettled: First steps at other knobs, or without deferral; bytes are counted after them.
    """
    seconds = [row["seconds"] for row in rows]
    total = sum(seconds)
    stalled = sum(row["stall_seconds"] for row in rows)
    steady = whole_windows(rows, update_interval, unsettled)
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "run_seconds": total,
        "mean_step_seconds": total / len(rows) if rows else math.nan,
        "median_step_seconds": median(seconds) if rows else math.nan,
        "p95_step_seconds": percentile(seconds, 0.95),
        "stall_seconds": stalled,
        "stall_fraction": stalled / total if total else math.nan,
        "d2h_bytes_per_step": _mean(row.get("d2h_bytes", 0) for row in steady),
        "h2d_bytes_per_step": _mean(row.get("h2d_bytes", 0) for row in steady),
        "bytes_over_steps": [steady[0]["step"], steady[-1]["step"]] if steady else None,
        "captured_energy": _mean(row.get("captured_energy", math.nan) for row in rows),
        "max_staleness": max((row.get("staleness", 0) for row in rows), default=0),
        "skipped_steps": sum(bool(row.get("skipped")) for row in rows),
        "final_train_loss": _mean(
            row["loss"] for row in rows[-LAST_LOSSES:] if row["loss"] is not None
        ),
        "tokens_per_second": sum(row["tokens"] for row in rows) / total if total else math.nan,
    }


def whole_windows(
    rows: Sequence[StepRow], update_interval: int, warm_up: int
) -> Sequence[StepRow]:
    """Return the rows of as many whole windows as there are once every block has landed.

    The first window has nothing to upload yet and the second may be of uneven length (rolling
    windows start one by one), so both are left out; of a run too short for that, all rows count.
    """
    steady = [row for row in rows if row["step"] > warm_up + 2 * update_interval]
    whole = len(steady) - len(steady) % update_interval
    return steady[:whole] if whole else rows


def _mean(values: Any) -> float:
    found = list(values)
    return fmean(found) if found else math.nan
