"""The four strategies on one model, one seed, one data order: a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.output.files import write_json
from experiments.output.outlook import Outlook, PlannedRun
from experiments.output.plots import RunRecord, draw_comparison, save_figure
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance
from experiments.output.run_types import RunSummary
from experiments.training.log.step_log import read_steps
from experiments.training.loop import MODEL, Outcome
from experiments.training.models.named import find_model
from experiments.training.preparation.emulated_link import LinkChoice, choose_link
from experiments.training.preparation.intention import (
    SECONDS_BESIDE_STEPS,
    START,
    compared,
    needs_start,
    step_cost,
)
from experiments.training.preparation.setup import build_setup, choose_device
from experiments.training.ranks.agreement import stop_together
from experiments.training.ranks.ranks import ALONE, Ranks
from experiments.training.run import run
from experiments.training.saved.checkpoint import CHECKPOINTS, latest_checkpoint
from experiments.training.saved.results import remove_results
from experiments.training.saved.runlock import locked
from experiments.training.settings.training import COMPARED, TrainSettings
from experiments.training.stop import StopRequest
from zenflow.trace.timeline import Timeline

COMPARISON = "compare.json"
"""A comparison's figures, every run's summary among them."""

PICTURE = "compare.png"


def started(
    settings: TrainSettings,
    folder: Path,
    *,
    reporter: Reporter,
    stop: StopRequest,
    ranks: Ranks = ALONE,
) -> tuple[TrainSettings, Outcome | None]:
    """Make the weights that all strategies go on from, if the model comes without.

    Returns:
        The strategies' settings, and how the start ended if it was made now.
    """
    if not needs_start(settings):
        return replace(settings, start_steps=None), None
    found, outcome = find_model(settings.model), None
    is_there = _is_finished(folder, settings.start_steps) and (folder / MODEL).is_dir()
    if not ranks.of_first(is_there):
        reporter.detail(f"\nstart: {settings.start_steps} steps on the device, for all strategies")
        outcome = _carried_out(
            settings.for_start(), folder, ranks, goes_on=True, reporter=reporter, stop=stop
        )
    # Absolute: the strategies go on from wherever they are resumed.
    model = f"{'own:' if found.own else ''}{(folder / MODEL).resolve()}"
    return replace(settings, start_steps=None, model=model), outcome


def _carried_out(
    settings: TrainSettings,
    folder: Path,
    ranks: Ranks,
    *,
    goes_on: bool,
    reporter: Reporter,
    stop: StopRequest,
) -> Outcome:
    """Carry out one run of a comparison, from its checkpoint if it is to go on and has one."""
    resume = ranks.of_first(goes_on and latest_checkpoint(folder / CHECKPOINTS) is not None)
    with locked(folder) if ranks.is_first else nullcontext():
        return run(settings, folder, reporter=reporter, stop=stop, resume=resume, ranks=ranks)


def run_comparison(
    settings: TrainSettings,
    folder: Path,
    *,
    reporter: Reporter,
    stop: StopRequest,
    resume: bool = False,
    overwrite: bool = False,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Run the strategies one after another and leave compare.json and compare.png beside them.

    Args:
        settings: What they share; their own knobs follow ``TrainSettings.with_strategy``. With a
            controller the tuned run comes last.
        folder: Gets a directory for each strategy.
        reporter: Hears of every step, and prints the table.
        stop: A request ends the run in progress after its step, and starts no other.
        resume: Keep what is finished, go on with what has a checkpoint.
        overwrite: Remove an earlier comparison's results once nothing more is checked.
        ranks: Processes that share every run; all of them call this, and the first one writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(compared(settings))
    ahead = _planned(settings, folder if resume else None)
    choice = None
    if settings.link is None and choose_device(settings).type == "cpu":
        choice = choose_link(build_setup(settings, ranks=ranks))
        reporter.say(str(choice))
        settings = replace(settings, link=(choice.bytes_per_second, choice.bytes_per_second))
    elif overwrite:
        build_setup(settings, ranks=ranks)  # refuses what no run could be made of
    if ranks.is_first:
        if overwrite:
            remove_results(folder)
        record = {"compare": names, "settings": settings.to_dict(), **provenance()}
        write_json(folder / "config.json", record)
    if settings.steps is not None:
        reporter.plan(_outlook(ahead, choice))
    shown: dict[str, Any] = {"reporter": reporter, "stop": stop}
    settings, outcome = started(settings, folder / START, ranks=ranks, **shown)
    if outcome is not None and (stop_together(ranks, stop) or outcome.stopped):
        return replace(outcome, stopped=True)
    for number, (strategy, own_settings) in enumerate(compared(settings).items(), start=1):
        own = folder / strategy
        if ranks.of_first(resume and _is_finished(own, settings.steps)):
            continue
        outcome = _carried_out(own_settings, own, ranks, goes_on=resume, **shown)
        is_asked = stop_together(ranks, stop)
        if outcome.stopped or (is_asked and number < len(names)):
            return replace(outcome, stopped=True)
    reporter.close()
    told = ranks.together(lambda: _ended(folder, names, reporter) if ranks.is_first else None)
    summary = ranks.of_first(told)
    assert summary is not None
    return outcome or Outcome(summary=summary, steps=0, stopped=False)


def _ended(folder: Path, names: Sequence[str], reporter: Reporter) -> RunSummary:
    """Write and show what the finished runs come to; return the last one's summary."""
    runs = [read_run(folder / strategy) for strategy in names]
    write_json(folder / COMPARISON, comparison(runs))
    save_figure(draw_comparison(runs), folder / PICTURE)
    reporter.console.print(table(runs))
    reporter.say(verdict(runs))
    reporter.say(_what_to_look_at(folder))
    return runs[-1].summary


def _planned(settings: TrainSettings, folder: Path | None) -> list[PlannedRun]:
    """Return the runs still to be done; ``folder`` holds those that are."""
    runs = []
    if needs_start(settings) and not (folder and _is_finished(folder / START, None)):
        runs.append(PlannedRun(START, settings.start_steps or 0))
    for name in compared(settings):
        if not (folder and _is_finished(folder / name, settings.steps)):
            runs.append(PlannedRun(name, settings.steps or 0, step_cost(name)))
    return runs


def _outlook(runs: Sequence[PlannedRun], choice: LinkChoice | None) -> Outlook:
    """Return how long the runs will take; without a measured step nobody knows yet."""
    if choice is None:
        return Outlook(runs, is_guessed=False)
    seconds = [replace(run, cost=run.cost * choice.compute_seconds) for run in runs]
    return Outlook(seconds, is_guessed=True, seconds_beside=SECONDS_BESIDE_STEPS)


def _what_to_look_at(folder: Path) -> str:
    return (
        f"Look at {folder / PICTURE}: steps, losses and stalls side by side. For the whole "
        f"timeline drop {folder / 'zenflow' / 'trace.json'} into https://ui.perfetto.dev, or "
        f"put everything on one page: zenflow report page.html {folder}"
    )


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


def _is_finished(folder: Path, steps: int | None) -> bool:
    """Return whether a run has taken the steps asked for; None asks for those it planned."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary["steps"] >= (steps or summary["planned_steps"]))
