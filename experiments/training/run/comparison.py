"""The four strategies on one model, one seed, one data order: a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.output.files import write_json
from experiments.output.outlook import Outlook, PlannedRun
from experiments.output.plots import draw_comparison, save_figure
from experiments.output.progress import Reporter
from experiments.output.run_types import RunSummary
from experiments.training.parts.files.checkpoint import CHECKPOINTS, latest_checkpoint
from experiments.training.parts.files.results import remove_results
from experiments.training.parts.files.runlock import locked
from experiments.training.parts.models.named import find_model
from experiments.training.parts.ranks.ranks import ALONE, Ranks
from experiments.training.parts.setup import build_setup, choose_device
from experiments.training.run.agreement import stop_together
from experiments.training.run.compared_runs import (
    COMPARISON,
    comparison,
    read_run,
    table,
    verdict,
)
from experiments.training.run.emulated_link import LinkChoice, choose_link
from experiments.training.run.intention import (
    SECONDS_BESIDE_STEPS,
    START,
    compared,
    needs_start,
    step_cost,
)
from experiments.training.run.loop import MODEL, Outcome
from experiments.training.run.single import run
from experiments.training.run.stop import StopRequest
from experiments.training.settings.training import TrainSettings
from zenflow.provenance import provenance

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


def _is_finished(folder: Path, steps: int | None) -> bool:
    """Return whether a run has taken the steps asked for; None asks for those it planned."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(summary["steps"] >= (steps or summary["planned_steps"]))
