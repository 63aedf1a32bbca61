"""What late updates cost: the record that the tuner's model of efficiency rests on.

``python -m experiments.studies.staleness.study`` fine-tunes the small model of
``experiments.studies.accuracy`` on the
device for several numbers of steps, and under the default preset with other windows, lags, shares
of important columns and selections, all without a link. It writes
``experiments/results/<date>_staleness_<cpu>/``: every run, the fitted constants, a table, a
picture. Runs that ``--runs`` holds already are not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from experiments.output.files import write_json, write_text
from experiments.output.plots import save_figure
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance, results_folder
from experiments.studies.accuracy import BASELINE, PRETRAINING, Task, measure, regimes, train
from experiments.studies.staleness.fit import LEAST_FITTED, fit, shorter_runs
from experiments.studies.staleness.picture import draw_efficiency
from experiments.training.settings import TrainSettings
from zenflow.errors import ZenFlowError
from zenflow.knobs import Knobs

REGIME = "fine-tuning"
RATES = (3e-4, 1e-3)
SEEDS = (0, 1)
SHARES = ((1.0, 0.6, 0.8, 0.9), (0.4, 0.85, 0.95))
"""Lengths of the device's runs over the whole one's, by part. Each has a schedule of its own: what
a longer run has reached by then, at a higher learning rate, says nothing of a shorter one."""


def settings_by_part(pretrained: Path, steps: int | None) -> list[list[TrainSettings]]:
    """Return the runs of one seed and rate: windows and lags first, then all other knobs.

    Args:
        pretrained: Folder of the model that fine-tuning starts from.
        steps: Of a whole run, in place of the regime's own.
    """
    common = next(r.settings for r in regimes(pretrained, steps) if r.name == REGIME)
    whole = common.steps or 0
    parts = []
    for shares, changes in zip(SHARES, (_windows(), _others()), strict=True):
        on_device = [
            replace(common, strategy=BASELINE, steps=round(share * whole)) for share in shares
        ]
        parts.append([*on_device, *(replace(common, knobs=knobs) for knobs in changes)])
    return parts


def _windows() -> Iterator[dict[str, Any]]:
    """Yield every S with every lag."""
    for interval in (16, 8, 4, 2, 1):
        for lag in (1, 2, 4, 8):
            if lag <= interval:
                yield {"update_interval": interval, "lag": lag}


def _others() -> Iterator[dict[str, Any]]:
    """Yield other shares, aligned windows and other selections, each at a few windows."""
    for interval in (16, 4):
        for ratio in (0.3, 0.02, 0.05):
            yield {"update_interval": interval, "topk_ratio": ratio}
    for interval in (16, 4, 8):
        for lag in (1, interval):
            yield {"update_interval": interval, "lag": lag, "rolling": False}
    for interval in (16, 4):
        for every in (25, 400):
            yield {"update_interval": interval, "select_interval": every}


def tasks_of(
    parts: Sequence[Sequence[TrainSettings]],
    runs: Path,
    rates: Sequence[float],
    seeds: Sequence[int],
) -> list[Task]:
    """Return every run, the most telling ones first, so that a study cut short is of use."""
    tasks = []
    for seed in seeds:
        for settings in (settings for part in parts for settings in part):
            name = variant_of(settings)
            for rate in rates:
                folder = runs / f"{name} {rate:g} seed {seed}".replace(" ", "_")
                task = Task(
                    regime=REGIME,
                    variant=name,
                    settings=replace(settings, lr=rate, seed=seed),
                    folder=folder,
                )
                tasks.append(task)
    return tasks


def variant_of(settings: TrainSettings) -> str:
    """Return the run's name: its knobs, or the device's with its steps."""
    if settings.strategy == BASELINE:
        return f"{BASELINE} steps={settings.steps}"
    return str(Knobs.of(settings.config(None)))


def report(
    record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], commit: str | None
) -> str:
    """Return the results as Markdown.

    Args:
        record: What ``fit`` returned.
        rows: What it was fitted to.
        commit: Of the program.
    """
    chosen = record["chosen"]
    lines = [
        "# What late updates cost",
        "",
        f"Made by `python -m experiments.studies.staleness.study`, commit {commit}: the "
        "fine-tuning of the "
        "accuracy record, without a link, so that nothing depends on timing. *Efficiency* is the "
        "share of its steps with which the device alone reaches the same held-out loss, by an "
        "exchange rate from shorter runs on the device, each with a schedule of its own. Mean "
        "over seeds (least to most).",
        "",
        "![efficiency over S by lag](efficiency.png)",
        "",
        f"Cost = 1/efficiency - 1 = rho {chosen['c']:.3g} (S - 1 + {chosen['d']:.3g} lag)^"
        f"{chosen['p']:.3g}, with rho the share of gradient energy in deferred columns: the "
        f"formula at learning rate {chosen['lr']:g}, where the device's loss is the lowest. "
        f"Fitted to rolling windows with an efficiency of {LEAST_FITTED} or more; below that "
        "costs rise more steeply than it says." + _aligned_note(chosen["aligned_stretch"]),
        "",
        *_fit_table(record),
        *_device_table(rows),
    ]
    for rate, exchange in record["exchange"].items():
        settings = [s for s in record["settings"] if f"{s['lr']:g}" == rate]
        lines += [
            "",
            f"## Learning rate {rate}",
            "",
            "| knobs | rho | held-out loss | above the device's | efficiency | by the formula |",
            "|---|---|---|---|---|---|",
            *(_setting_line(setting, exchange["least_share"]) for setting in settings),
        ]
    return "\n".join(lines) + "\n"


def _aligned_note(stretch: float | None) -> str:
    if stretch is None:
        return ""
    return f" In windows that end together S - 1 counts {stretch:.3g} times."


def _fit_table(record: Mapping[str, Any]) -> list[str]:
    lines = [
        "| learning rate | formula | constants | rms of relative error |",
        "|---|---|---|---|",
    ]
    for rate, fits in record["fits"].items():
        for name, fitted in fits.items():
            constants = ", ".join(f"{k} = {v:.3g}" for k, v in fitted.items() if k != "rms")
            lines.append(f"| {rate} | {name} | {constants} | {fitted['rms']:.1%} |")
    return lines


def _device_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = shorter_runs(rows)
    rates = sorted({rate for rate, _ in found})
    lines = [
        "",
        "| on the device, share of the steps | "
        + " | ".join(f"loss above the whole run's at {rate:g}" for rate in rates)
        + " |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for share in sorted({share for _, share in found}, reverse=True):
        cells = [
            f"{fmean(found[rate, share]):+.2%}" if (rate, share) in found else "" for rate in rates
        ]
        lines.append(f"| {share:g} | " + " | ".join(cells) + " |")
    return lines


def _setting_line(setting: Mapping[str, Any], least_share: float) -> str:
    knobs = Knobs.from_dict(setting["knobs"])
    values, efficiency = setting["efficiencies"], f"{setting['efficiency']:.3f}"
    if len(values) > 1:
        efficiency += f" ({min(values):.3f} to {max(values):.3f})"
    if setting["efficiency"] < least_share:
        efficiency = f"below {least_share:g}"
    return (
        f"| {knobs} | {setting['rho']:.2f} | {setting['loss']:.4f} | {setting['excess']:+.2%} | "
        f"{efficiency} | {setting['predicted_efficiency']:.3f} |"
    )


@click.command()
@click.option("--rates", default=",".join(f"{r:g}" for r in RATES), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--steps", type=int, help="Steps of a whole run; default: fine-tuning's own.")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the runs here.")
@click.option("--finished", is_flag=True, help="Train nothing: record the runs that are there.")
@click.option("--workers", type=int, default=1, show_default=True, help="Runs at a time.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the record goes.")
def main(
    rates: str,
    seeds: str,
    steps: int | None,
    runs: Path | None,
    finished: bool,
    workers: int,
    out: Path | None,
) -> None:
    """Measure and write the record."""
    reporter = Reporter()
    kept = runs or Path("runs") / f"staleness-{time.strftime('%Y%m%d-%H%M%S')}"
    origin = provenance()
    try:
        if not finished:
            train(replace(PRETRAINING, steps=steps or PRETRAINING.steps), kept / "pretraining")
        tasks = tasks_of(
            settings_by_part(kept / "pretraining" / "model", steps),
            kept,
            [float(rate) for rate in rates.split(",")],
            [int(seed) for seed in seeds.split(",")],
        )
        if finished:
            tasks = [task for task in tasks if (task.folder / "summary.json").is_file()]
        rows = measure(tasks, reporter, workers)
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    folder = out or results_folder("staleness")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "record.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    record = fit(rows)
    write_json(folder / "fit.json", record)
    write_json(folder / "provenance.json", origin)
    write_text(folder / "README.md", report(record, rows, origin["commit"]))
    save_figure(draw_efficiency(record), folder / "efficiency.png")
    reporter.say("\n" + report(record, rows, origin["commit"]))


if __name__ == "__main__":
    main()
