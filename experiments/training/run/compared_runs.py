"""Finished runs of a comparison side by side: read, judged, and shown as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.output.plots import RunRecord
from experiments.output.run_types import RunSummary
from experiments.training.parts.files.step_log import read_steps
from experiments.training.settings.comparison import COMPARED
from zenflow.provenance import provenance
from zenflow.trace.timeline import Timeline

COMPARISON = "compare.json"
"""A comparison's figures, every run's summary among them."""


def read_run(folder: Path) -> RunRecord:
    """Return a finished run from its files."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    trace = folder / "trace.json"
    return RunRecord(
        strategy=summary["strategy"],
        summary=summary,
        rows=read_steps(folder / "steps.jsonl"),
        timeline=Timeline.read(trace) if trace.is_file() else Timeline(),
    )


def read_comparison(folder: Path) -> list[RunRecord]:
    """Return a comparison's runs from its compare.json alone, which has no rows and no spans."""
    found = json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
    return [
        RunRecord(strategy=name, summary=summary, rows=(), timeline=Timeline())
        for name, summary in found["runs"].items()
    ]


def comparison(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return compare.json: every summary, and the figures that only a comparison has."""
    by_name = {run.strategy: run.summary for run in runs}
    return {
        "emulated_link": runs[0].summary["emulated_link"],
        **{
            name: {
                "stall_removed_share": stall_removed(by_name, name),
                "speedup_over_zero_offload": _speedup(by_name, name),
                "eval_loss_over_on_device": eval_loss_ratio(by_name, name),
            }
            for name in _judged(by_name)
        },
        "runs": by_name,
        **provenance(),
    }


def stall_removed(summaries: Mapping[str, RunSummary], strategy: str = "zenflow") -> float | None:
    """Return the share of zero_offload's stall seconds per step that a strategy does not have."""
    before, after = summaries["zero_offload"], summaries[strategy]
    if not before["stall_seconds"]:
        return None
    stalled: float = after["stall_seconds"] / after["steps"]
    return 1 - stalled / (before["stall_seconds"] / before["steps"])


def eval_loss_ratio(summaries: Mapping[str, RunSummary], strategy: str) -> float | None:
    """Return a strategy's held-out loss over on_device's."""
    mine, base = summaries[strategy]["eval_loss"], summaries["on_device"]["eval_loss"]
    return mine / base if mine and base else None


def table(runs: Sequence[RunRecord]) -> Table:
    """Return the strategies side by side."""
    emulated = runs[0].summary["emulated_link"] is not None
    made = Table(title="Strategies side by side" + (" (emulated link)" if emulated else ""))
    made.add_column("strategy", no_wrap=True)
    for name in (
        "step ms", "p95 ms", "stalled", "tokens/s", "d2h MB/step", "h2d MB/step",
        "host B/param", "train loss", "held-out", "vs on_device",
    ):  # fmt: skip
        made.add_column(name, justify="right")
    by_name = {run.strategy: run.summary for run in runs}
    for strategy, summary in by_name.items():
        ratio = eval_loss_ratio(by_name, strategy)
        made.add_row(
            strategy,
            f"{summary['mean_step_seconds'] * 1e3:.0f}",
            f"{summary['p95_step_seconds'] * 1e3:.0f}",
            f"{summary['stall_fraction']:.1%}",
            f"{summary['tokens_per_second']:.0f}",
            f"{summary['d2h_bytes_per_step'] / 1e6:.2f}",
            f"{summary['h2d_bytes_per_step'] / 1e6:.2f}",
            f"{summary['host_bytes_per_param']:.1f}",
            f"{summary['final_train_loss']:.4f}",
            f"{summary['eval_loss']:.4f}",
            "-" if ratio is None else f"{ratio - 1:+.2%}",
        )
    return made


def verdict(runs: Sequence[RunRecord]) -> str:
    """Return the comparison in a sentence for zenflow, and one for a tuned run."""
    by_name = {run.strategy: run.summary for run in runs}
    return "\n".join(_verdict(by_name, name) for name in _judged(by_name))


def _judged(names: Iterable[str]) -> list[str]:
    """Return the strategies that a comparison is about: zenflow, and a tuned run."""
    return [name for name in names if name == "zenflow" or name not in COMPARED]


def _verdict(by_name: Mapping[str, RunSummary], strategy: str) -> str:
    removed, speedup = stall_removed(by_name, strategy), _speedup(by_name, strategy)
    loss = eval_loss_ratio(by_name, strategy)
    if removed is None or speedup is None or loss is None:
        return "zero_offload did not stall here, so there was nothing to win."
    return (
        f"{strategy}: {removed:.1%} of zero_offload's stall gone, {speedup:.2f}x its speed, "
        f"held-out loss {loss - 1:+.2%} against on_device."
    )


def _speedup(summaries: Mapping[str, RunSummary], strategy: str) -> float | None:
    before: float = summaries["zero_offload"]["mean_step_seconds"]
    after: float = summaries[strategy]["mean_step_seconds"]
    return before / after if after else None
