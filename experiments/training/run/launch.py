"""Start a run, print how it ended, and return that with the process's exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.output.bar import wide_console
from experiments.output.progress import Reporter
from experiments.training.parts.files.checkpoint import CHECKPOINTS, latest_checkpoint
from experiments.training.parts.ranks.launched import resume_line
from experiments.training.parts.ranks.ranks import Ranks, joined
from experiments.training.run.compared_runs import COMPARISON
from experiments.training.run.comparison import run_comparison
from experiments.training.run.ending import how_to_load, out_of_memory, stop_notice
from experiments.training.run.loop import MODEL, Outcome
from experiments.training.run.single import run
from experiments.training.run.stop import StopRequest
from experiments.training.run.summary import LAST_LOSSES
from experiments.training.settings.training import TrainSettings
from zenflow.knobs import Knobs


def launch(
    settings: TrainSettings, folder: Path, *, compare: bool, resume: bool, overwrite: bool = False
) -> tuple[int, dict[str, Any]]:
    """Run once or four times; return 0, or 128 + its number after a signal, and the outcome.

    Of several ranks the first one shows the run, and names the folder.
    """
    work: Callable[..., Outcome] = run_comparison if compare else run
    work = partial(work, resume=resume, overwrite=overwrite)
    with joined(settings.parallel, settings.device) as ranks:
        return _launch(work, settings, ranks.of_first(folder), ranks, compare=compare)


def _launch(
    work: Callable[..., Outcome],
    settings: TrainSettings,
    folder: Path,
    ranks: Ranks,
    *,
    compare: bool,
) -> tuple[int, dict[str, Any]]:
    record: dict[str, Any] = {"folder": str(folder), "stopped": True}
    reporter = Reporter(wide_console() if ranks.is_first else Console(quiet=True))
    notice = stop_notice(saves=settings.checkpoint)
    with StopRequest(notice if ranks.is_first else "") as stop:
        try:
            outcome = work(settings, folder, reporter=reporter, stop=stop, ranks=ranks)
        except KeyboardInterrupt:
            if not stop.requested:
                raise
            reporter.finish()
            reporter.say(_what_is_left(folder))
            return stop.exit_code, record | {"resume": resume_line(folder)}
        except (MemoryError, RuntimeError) as error:
            told = out_of_memory(error)
            if told is None:
                raise
            raise told from error
        finally:
            reporter.close()
        record |= {"stopped": outcome.stopped, "steps": outcome.steps}
        if outcome.stopped:
            name = stop.signal.name if stop.signal else "a signal"
            saved = "everything is saved. Go on with: " + resume_line(folder)
            if not settings.checkpoint:
                saved = _what_was_saved(folder, compare=compare)
            reporter.say(f"Stopped by {name} after step {outcome.steps}; {saved}")
            return stop.exit_code, record | {"resume": resume_line(folder)}
    if not compare:
        reporter.say(_last_line(outcome))
    _list_files(reporter, folder)
    if not compare and (folder / MODEL).is_dir():
        reporter.say(how_to_load(folder / MODEL))
    if compare:
        return 0, record | json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
    return 0, {**record, **outcome.summary}


def _what_was_saved(folder: Path, *, compare: bool) -> str:
    """Return the advice on resuming a run that ended early and saves nothing."""
    if compare:
        return f"its finished runs are kept. Go on behind them with: {resume_line(folder)}"
    found = latest_checkpoint(folder / CHECKPOINTS)
    if found is None:
        return "nothing of it can be resumed, as --no-checkpoint asked."
    return (
        "nothing was saved since it was resumed, as --no-checkpoint asked. Go on from "
        f"{found.name} with: {resume_line(folder)}"
    )


def _what_is_left(folder: Path) -> str:
    found = sorted(folder.rglob(f"{CHECKPOINTS}/step-*"), key=lambda path: path.stat().st_mtime)
    if not found:
        return "Ended at once. Nothing had been saved."
    return f"Ended at once. The last save is {found[-1]}. Go on with: {resume_line(folder)}"


def _last_line(outcome: Outcome) -> str:
    summary = outcome.summary
    accuracy = summary.get("eval_accuracy")
    emulated = " (emulated link)" if summary["emulated_link"] else ""
    tuning = summary["tuning"]
    return (
        f"{summary['strategy']}: {summary['steps']} steps of "
        f"{summary['mean_step_seconds'] * 1e3:.0f} ms, {summary['stall_fraction']:.1%} "
        f"stalled{emulated}, training loss {summary['final_train_loss']:.4f} (mean of the last "
        f"{min(LAST_LOSSES, summary['steps'])} steps), held-out loss {summary['eval_loss']:.4f}"
        + ("" if accuracy is None else f", accuracy {accuracy:.3f}")
        + ("" if tuning is None else f"; {_tuned(tuning)}")
    )


def _tuned(tuning: Mapping[str, Any]) -> str:
    share, count = tuning["search_share"] or 0.0, tuning["num_decisions"]
    return (
        f"{count} decision{'' if count == 1 else 's'}, at the end "
        f"{Knobs.from_dict(tuning['knobs'])}, search {share:.1%} of the run"
    )


def _list_files(reporter: Reporter, folder: Path) -> None:
    names = sorted(
        path.name + ("/" if path.is_dir() else "")
        for path in folder.iterdir()
        if not path.name.startswith(".")
    )
    reporter.say(f"Results are in {folder}: {', '.join(names)}")
