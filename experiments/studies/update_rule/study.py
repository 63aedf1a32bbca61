"""The ablation of the update rule: what each knob wins back, from scratch and fine-tuning.

``python -m experiments.studies.update_rule.study`` trains what ``update_rule_design`` lists,
without a link, so
that nothing depends on timing. Runs that a committed record of the accuracy and staleness studies
has already are read from there, and those that ``--runs`` holds are not repeated. It writes
``experiments/results/<date>_update_rule_<cpu>/``: every run, a summary, tables.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from experiments.output.files import write_json, write_text
from experiments.output.progress import Reporter
from experiments.output.provenance import RESULTS, provenance, results_folder
from experiments.studies.accuracy import BASELINE, PRETRAINING, regimes, train
from experiments.studies.update_rule.design import GROUPS, VARIANTS, Group, Variant
from experiments.studies.update_rule.report import report, summarise
from experiments.studies.update_rule.step_clip import clipped_steps
from experiments.training.settings import TrainSettings
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError, ZenFlowError

SEEDS = (0, 1, 2)
_OWN = "this study"
_REUSED = ("staleness", "accuracy")
"""Records whose runs are read, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTask:
    """One run."""

    regime: str
    variant: str
    settings: TrainSettings
    clip: float | None
    folder: Path

    @property
    def key(self) -> str:
        """What decides the run's result, as text."""
        return _key(
            self.regime, self.settings.lr, self.settings.seed, self.settings.steps or 0,
            self.settings.config(None).to_dict(), self.clip,
        )  # fmt: skip


def _key(
    regime: str, lr: float, seed: int, steps: int, config: Mapping[str, Any], clip: float | None
) -> str:
    # Fields that a record has from before they existed take their defaults.
    whole = ZenFlowConfig.from_dict(config).to_dict()
    return json.dumps([regime, f"{lr:g}", seed, steps, clip, sorted(whole.items())])


def tasks_of(
    pretrained: Path,
    runs: Path,
    seeds: Sequence[int] = SEEDS,
    steps: int | None = None,
    groups: Sequence[Group] = GROUPS,
) -> list[RuleTask]:
    """Return every run, those on the device first, then the most telling.

    Args:
        pretrained: Folder of the model that fine-tuning starts from.
        runs: Gets a folder for each run.
        seeds: Of each run.
        steps: Of every run, in place of each regime's own.
        groups: Which runs.
    """
    common = {regime.name: regime.settings for regime in regimes(pretrained, steps)}
    on_device = Variant(name=BASELINE, strategy=BASELINE)
    return [
        _task(group, variant, common[group.regime], seed, runs)
        for group in groups
        for variant in (on_device, *(VARIANTS[name] for name in group.variants))
        for seed in seeds
    ]


def _task(
    group: Group, variant: Variant, common: TrainSettings, seed: int, runs: Path
) -> RuleTask:
    name = f"{group.regime} {variant.name} {group.lr:g} seed {seed}"
    settings = replace(
        common,
        strategy=variant.strategy,
        knobs=variant.knobs_over(common.steps or 0),
        lr=group.lr,
        seed=seed,
    )
    return RuleTask(
        regime=group.regime,
        variant=variant.name,
        settings=settings,
        clip=variant.clip,
        folder=runs / name.replace(" ", "_"),
    )


def recorded_runs(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the rows of earlier records by what decides them, the newest record of each study.

    Each has the name of its record as ``source``.
    """
    found: dict[str, dict[str, Any]] = {}
    for study in _REUSED:
        record = max(results.glob(f"*_{study}_*/record.jsonl"), default=None)
        if record is None:
            continue
        for line in record.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            key = _key(row["regime"], row["lr"], row["seed"], row["steps"], row["config"], None)
            found.setdefault(key, {**row, "source": record.parent.name})
    return found


def missing(tasks: Sequence[RuleTask], recorded: Mapping[str, Any]) -> list[RuleTask]:
    """Return the runs that no record has, and the runs on the device that they are compared with.

    A run is compared with one made by the same program on the same machine.
    """
    new = [t for t in tasks if t.variant != BASELINE and t.key not in recorded]
    places = {(t.regime, t.settings.lr, t.settings.seed) for t in new}
    needed = [
        t
        for t in tasks
        if t.variant == BASELINE and (t.regime, t.settings.lr, t.settings.seed) in places
    ]
    chosen = {id(task) for task in (*new, *needed)}
    return [task for task in tasks if id(task) in chosen]


def train_rule(settings: TrainSettings, clip: float | None, folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run, made now unless the folder has it."""
    with clipped_steps(clip):
        return train(settings, folder)


def measure(tasks: Sequence[RuleTask], reporter: Reporter, workers: int) -> list[dict[str, Any]]:
    """Carry out all runs and return a row for each, in the order of the tasks."""
    context = multiprocessing.get_context("spawn")
    rows: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {
            pool.submit(train_rule, task.settings, task.clip, task.folder): number
            for number, task in enumerate(tasks)
        }
        try:
            for future in as_completed(futures):
                number = futures[future]
                rows[number] = row = _row(tasks[number], future.result())
                name = tasks[number].folder.name
                reporter.say(f"{len(rows)}/{len(tasks)}  {name}: {row['eval_loss']:.4f}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[number] for number in range(len(tasks))]


def _row(task: RuleTask, summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "regime": task.regime,
        "variant": task.variant,
        "lr": task.settings.lr,
        "seed": task.settings.seed,
        "steps": task.settings.steps,
        "clip": task.clip,
        "source": _OWN,
        **{k: summary[k] for k in ("eval_loss", "captured_energy", "config")},
    }


def all_rows(
    tasks: Sequence[RuleTask],
    recorded: Mapping[str, Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the runs made now, then those of earlier records that the study has."""
    rows = [dict(row) for row in own]
    for task in tasks:
        known = recorded.get(task.key)
        if known is not None:
            # An early record has no energies.
            kept = ("regime", "lr", "seed", "steps", "eval_loss", "captured_energy", "config")
            row = {key: known.get(key) for key in kept}
            rows.append(row | {"variant": task.variant, "clip": None, "source": known["source"]})
    return rows


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a record of this study."""
    lines = (folder / "record.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def newest_record(results: Path = RESULTS) -> Path | None:
    """Return the folder of the newest committed record; None if there is none."""
    found = max(results.glob("*_update_rule_*/record.jsonl"), default=None)
    return None if found is None else found.parent


def _write(folder: Path, rows: Sequence[Mapping[str, Any]], origin: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(rows)
    text = report(summary, origin["commit"])
    write_text(folder / "record.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "summary.json", summary)
    write_json(folder / "provenance.json", origin)
    write_text(folder / "README.md", text)
    return text


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise click.UsageError(
            f"--seeds must be whole numbers with commas between, but is {text!r}: 0,1,2, say"
        ) from None


@click.command()
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--steps", type=click.IntRange(1), help="Of every run; default: its regime's own.")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the runs here; goes on there.")
@click.option("--finished", is_flag=True, help="Train nothing: record the runs that are there.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--record", type=click.Path(path_type=Path), help="Where the record goes.")
def main(
    seeds: str,
    steps: int | None,
    runs: Path | None,
    finished: bool,
    workers: int,
    record: Path | None,
) -> None:
    """Train what is missing and write the record."""
    reporter, chosen = Reporter(), _seeds(seeds)
    kept = runs or Path("runs") / f"update-rule-{time.strftime('%Y%m%d-%H%M%S')}"
    origin = provenance()
    try:
        tasks = tasks_of(kept / "pretraining" / "model", kept, chosen, steps)
        recorded = recorded_runs()
        wanted = missing(tasks, recorded)
        if finished:
            wanted = [task for task in wanted if (task.folder / "summary.json").is_file()]
        else:
            reporter.say(f"{len(wanted)} runs; {len(tasks) - len(wanted)} are recorded already")
            pretraining = replace(PRETRAINING, steps=steps or PRETRAINING.steps)
            train(pretraining, kept / "pretraining")
        own = measure(wanted, reporter, workers)
        if not own:
            raise ConfigError(f"{kept} has no finished run: leave out --finished")
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        reporter.say(f"Stopped. Go on with --runs {kept}, or record what is there: --finished.")
        raise click.Abort from None
    rows = all_rows(tasks, recorded, own)
    reporter.say("\n" + _write(record or results_folder("update_rule"), rows, origin))


if __name__ == "__main__":
    main()
