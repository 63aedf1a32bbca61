"""How much of AdamW's accuracy the strategies keep: from scratch, fine-tuning, by learning rate.

``python -m experiments.studies.accuracy`` trains every variant on several seeds, without a link,
as many runs at a time as there are cores (what is computed does not depend on timing), and writes
``experiments/results/<date>_accuracy_<cpu>/``: every run's losses, a table, a picture. Runs that
``--runs`` holds already are not repeated.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console

from experiments.output.files import write_json, write_text
from experiments.output.plots import draw_excess, save_figure
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance, results_folder
from experiments.training.run import run
from experiments.training.settings import TrainSettings
from experiments.training.stop import StopRequest
from zenflow.errors import ConfigError, ZenFlowError
from zenflow.host.limits import usable_cores

BASELINE = "on_device"
SEEDS = (0, 1, 2)
WARM_UP = 160
"""Steps W in which one variant defers nothing: twice the rise of the learning rate."""
PRETRAINING = TrainSettings(strategy=BASELINE, steps=2500, lr=2e-3, device_threads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of training, at several learning rates, under several strategies."""

    name: str
    settings: TrainSettings
    rates: tuple[float, ...]
    variants: Mapping[str, tuple[str, Mapping[str, Any]]]
    """By name the preset and what is changed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run."""

    regime: str
    variant: str
    settings: TrainSettings
    folder: Path


def regimes(pretrained: Path, steps: int | None = None) -> list[Regime]:
    """Return what is compared.

    Args:
        pretrained: Folder of the model that fine-tuning starts from.
        steps: Of every run, in place of each regime's own.
    """
    window = {"deferred_moments": "window"}
    warm = {**window, "full_warm_up_rounds": WARM_UP}
    compared: dict[str, tuple[str, Mapping[str, Any]]] = {
        BASELINE: (BASELINE, {}),
        "zenflow_paper": ("zenflow_paper", {}),
        "zenflow": ("zenflow", {}),
        "zenflow, window moments": ("zenflow", window),
    }
    common = TrainSettings(device_threads=1, host_threads=1, timeline_steps=0)
    return [
        Regime(
            name="from scratch",
            settings=replace(common, steps=steps or 800),
            rates=(4e-4, 1e-3),
            variants={**compared, f"zenflow, window moments, W = {WARM_UP}": ("zenflow", warm)},
        ),
        Regime(
            name="fine-tuning",
            settings=replace(
                common, steps=steps or 400, model=str(pretrained), data=str(documentation())
            ),
            rates=(1e-4, 3e-4, 1e-3),
            variants={**compared, "zenflow, S = 16": ("zenflow", {"update_interval": 16})},
        ),
    ]


def documentation() -> Path:
    """Return the file with Python's own documentation: English, and not in the default data.

    Raises:
        ConfigError: This Python comes without it.
    """
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise ConfigError("this Python has no pydoc_data: use one that comes with its help texts")
    return Path(spec.origin)


def tasks_of(chosen: Sequence[Regime], seeds: Sequence[int], runs: Path) -> list[Task]:
    """Return every run, baselines first."""
    return [
        Task(
            regime=regime.name,
            variant=variant,
            settings=replace(
                regime.settings, strategy=strategy, knobs=dict(knobs), lr=rate, seed=seed
            ),
            folder=runs / f"{regime.name} {variant} {rate:g} seed {seed}".replace(" ", "_"),
        )
        for regime in chosen
        for rate in regime.rates
        for variant, (strategy, knobs) in regime.variants.items()
        for seed in seeds
    ]


def train(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run, made now unless the folder has it.

    Raises:
        KeyboardInterrupt: A signal ended the run early.
    """
    finished = folder / "summary.json"
    if not finished.is_file():
        with StopRequest() as stop:
            outcome = run(settings, folder, reporter=Reporter(Console(quiet=True)), stop=stop)
        if outcome.stopped:
            finished.unlink()
            raise KeyboardInterrupt
    summary: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
    return summary


def measure(tasks: Sequence[Task], reporter: Reporter, workers: int) -> list[dict[str, Any]]:
    """Carry out all runs and return a row for each, in the order of the tasks."""
    context = multiprocessing.get_context("spawn")
    summaries: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(train, t.settings, t.folder): i for i, t in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                index = futures[future]
                summaries[index] = future.result()
                reporter.say(
                    f"{len(summaries)}/{len(tasks)}  {tasks[index].folder.name}: "
                    f"{summaries[index]['eval_loss']:.4f}"
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [
        {
            "regime": task.regime,
            "variant": task.variant,
            "lr": task.settings.lr,
            "seed": task.settings.seed,
            "steps": task.settings.steps,
            "eval_loss": summaries[index]["eval_loss"],
            "captured_energy": summaries[index]["captured_energy"],
            "final_train_loss": summaries[index]["final_train_loss"],
            "config": summaries[index]["config"],
        }
        for index, task in enumerate(tasks)
    ]


def excesses(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, float], list[float]]:
    """Return eval loss over the baseline's of the same seed, less 1, by (regime, variant, lr)."""
    baseline = {
        (row["regime"], row["lr"], row["seed"]): row["eval_loss"]
        for row in rows
        if row["variant"] == BASELINE
    }
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        if row["variant"] != BASELINE:
            ratio = row["eval_loss"] / baseline[row["regime"], row["lr"], row["seed"]]
            found.setdefault((row["regime"], row["variant"], row["lr"]), []).append(ratio - 1)
    return found


def report(rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Accuracy by regime",
        "",
        f"Made by `python -m experiments.studies.accuracy`, commit {origin['commit']}, on "
        f"{origin['hardware']['cpu']}. Held-out loss, and what the strategies' lies above "
        f"{BASELINE}'s of the same seed: mean (least to most) over the seeds. Fine-tuning goes on "
        f"from a model trained {PRETRAINING.steps} steps on the default data, with Python's "
        "documentation as its text.",
        "",
        "![excess of the held-out loss](accuracy.png)",
    ]
    found = excesses(rows)
    for regime in dict.fromkeys(row["regime"] for row in rows):
        own = [row for row in rows if row["regime"] == regime]
        variants = [v for v in dict.fromkeys(row["variant"] for row in own) if v != BASELINE]
        lines += [
            "",
            f"## {regime}, {own[0]['steps']} steps",
            "",
            f"| learning rate | {BASELINE} | " + " | ".join(variants) + " |",
            "|---" * (len(variants) + 2) + "|",
        ]
        for rate in dict.fromkeys(row["lr"] for row in own):
            loss = fmean(
                r["eval_loss"] for r in own if r["lr"] == rate and r["variant"] == BASELINE
            )
            cells = [_cell(found[regime, variant, rate]) for variant in variants]
            lines.append(f"| {rate:g} | {loss:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float]) -> str:
    return f"{fmean(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})"


@click.command()
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--steps", type=int, help="Steps of every run; default: each regime's own.")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the runs here.")
@click.option("--workers", type=int, help="Runs at a time; default: one on each core.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the record goes.")
def main(
    seeds: str, steps: int | None, runs: Path | None, workers: int | None, out: Path | None
) -> None:
    """Measure and write the record."""
    reporter = Reporter()
    kept = runs or Path("runs") / f"accuracy-{time.strftime('%Y%m%d-%H%M%S')}"
    origin = provenance()
    try:
        pretraining = replace(PRETRAINING, steps=steps or PRETRAINING.steps)
        train(pretraining, kept / "pretraining")
        chosen = regimes(kept / "pretraining" / "model", steps)
        tasks = tasks_of(chosen, [int(seed) for seed in seeds.split(",")], kept)
        rows = measure(tasks, reporter, workers or usable_cores())
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    folder = out or results_folder("accuracy")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "record.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "provenance.json", origin)
    write_text(folder / "README.md", report(rows, origin))
    save_figure(draw_excess(excesses(rows)), folder / "accuracy.png")
    reporter.say("\n" + report(rows, origin))


if __name__ == "__main__":
    main()
