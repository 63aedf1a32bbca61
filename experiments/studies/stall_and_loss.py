"""What the main job claims, measured: stall removed, loss kept, no spike at window boundaries.

``python -m experiments.studies.stall_and_loss`` runs the strategies on three seeds over one
emulated link, writes
``experiments/results/<date>_stall_and_loss_<cpu>/`` with every run's summary, and prints which of
the claims hold. The slow test of the same name asserts them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from experiments.output.files import write_json, write_text
from experiments.output.plots import RunRecord
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance, results_folder
from experiments.training.comparison import (
    START,
    eval_loss_ratio,
    read_run,
    stall_removed,
    started,
    with_link,
)
from experiments.training.loop import Outcome
from experiments.training.run import run
from experiments.training.settings import COMPARED, TrainSettings
from experiments.training.stop import StopRequest
from zenflow.errors import ZenFlowError

SEEDS = (0, 1, 2)
ALIGNED = "zenflow_aligned"
"""The default strategy with windows that end together; only its step times matter."""

LEAST_STALL_OF_ZERO_OFFLOAD = 0.5
LEAST_STALL_REMOVED = 0.85
MOST_LOSS_DISTANCE = 0.01
"""Above or below: the same trajectory is claimed, not a better one."""
MOST_SPREAD_OVER_WINDOW = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement with the number that decides it."""

    text: str
    value: float
    bound: float
    holds: bool


def measure(
    settings: TrainSettings, folder: Path, seeds: Sequence[int], reporter: Reporter
) -> list[dict[str, Any]]:
    """Run every strategy for every seed over one link and return a row for each run.

    The first seed has the aligned variant as well.
    """
    settings = with_link(settings, reporter)
    rows = []
    with StopRequest() as stop:
        for number, seed in enumerate(seeds):
            own = folder / f"seed-{seed}"
            seeded, outcome = started(
                replace(settings, seed=seed), own / START, reporter=reporter, stop=stop
            )
            _abort_if_stopped(outcome)
            for variant in (*COMPARED, ALIGNED) if number == 0 else COMPARED:
                reporter.say(f"\nseed {seed}, {variant}")
                chosen = _variant(seeded, variant)
                _abort_if_stopped(run(chosen, own / variant, reporter=reporter, stop=stop))
                rows.append(_row(variant, seed, read_run(own / variant)))
    return rows


def _abort_if_stopped(outcome: Outcome | None) -> None:
    if outcome is not None and outcome.stopped:
        raise click.Abort


def claims_of(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the claims about the rows of ``measure``, each with whether it holds."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        runs = {row["variant"]: row["summary"] for row in rows if row["seed"] == seed}
        stall = runs["zero_offload"]["stall_fraction"]
        removed = stall_removed(runs) or 0.0
        distance = abs((eval_loss_ratio(runs, "zenflow") or float("inf")) - 1)
        found += [
            _at_least(f"seed {seed}: share of zero_offload's time stalled", stall,
                      LEAST_STALL_OF_ZERO_OFFLOAD),
            _at_least(f"seed {seed}: share of those stall seconds that zenflow is without",
                      removed, LEAST_STALL_REMOVED),
            _at_most(f"seed {seed}: held-out loss off on_device's", distance, MOST_LOSS_DISTANCE),
        ]  # fmt: skip
    spreads = {
        variant: _mean_spread(row for row in rows if row["variant"] == variant)
        for variant in ("zenflow", ALIGNED)
    }
    found.append(
        _at_most("rolling windows: slowest over fastest median step by position in the window",
                 spreads["zenflow"], MOST_SPREAD_OVER_WINDOW)
    )  # fmt: skip
    found.append(
        _at_least("aligned windows: the same, their spike", spreads[ALIGNED],
                  MOST_SPREAD_OVER_WINDOW)
    )  # fmt: skip
    return found


def seconds_by_position(
    rows: Sequence[Mapping[str, Any]], update_interval: int, warm_up: int
) -> list[float]:
    """Return the median step time at each place in a window, the first window left out."""
    places: list[list[float]] = [[] for _ in range(update_interval)]
    for row in rows:
        behind = row["step"] - warm_up - 1
        if behind >= update_interval:
            places[behind % update_interval].append(row["seconds"])
    return [median(seconds) for seconds in places if seconds]


def report(rows: Sequence[Mapping[str, Any]], claims: Sequence[Claim]) -> str:
    """Return the results as Markdown: claims, then every run."""
    summary = rows[0]["summary"]
    link = summary["emulated_link"]
    lines = [
        "# Stall and loss under an emulated link",
        "",
        f"Made by `python -m experiments.studies.stall_and_loss` on {summary['hardware']['cpu']}, "
        f"{summary['hardware']['cores']} cores, commit {summary['commit']}. The link is emulated: "
        f"{link['d2h_bytes_per_second'] / 1e6:.1f} MB/s each way.",
        "",
        f"A model of {summary['num_params']:,} parameters on {summary['data']}, "
        f"{summary['steps']} steps. For each seed a run on the device makes the weights that all "
        "strategies start from.",
        "",
        "| claim | measured | bound | holds |",
        "|---|---|---|---|",
        *(
            f"| {c.text} | {c.value:.4f} | {c.bound} | {'yes' if c.holds else 'NO'} |"
            for c in claims
        ),
        "",
        "| seed | strategy | step ms | stalled | held-out loss | median step ms by position |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row["summary"]
        places = ", ".join(f"{seconds * 1e3:.0f}" for seconds in row["seconds_by_position"])
        lines.append(
            f"| {row['seed']} | {row['variant']} | {found['mean_step_seconds'] * 1e3:.0f} | "
            f"{found['stall_fraction']:.1%} | {found['eval_loss']:.4f} | {places} |"
        )
    return "\n".join(lines) + "\n"


def _variant(settings: TrainSettings, variant: str) -> TrainSettings:
    if variant != ALIGNED:
        return settings.with_strategy(variant)
    return replace(settings, strategy="zenflow", knobs={**settings.knobs, "rolling": False})


def _row(variant: str, seed: int, record: RunRecord) -> dict[str, Any]:
    config = record.summary["config"]
    return {
        "variant": variant,
        "seed": seed,
        "summary": dict(record.summary),
        "seconds_by_position": seconds_by_position(
            record.rows, config["update_interval"], config["full_warm_up_rounds"]
        ),
    }


def _mean_spread(rows: Iterable[Mapping[str, Any]]) -> float:
    places = [row["seconds_by_position"] for row in rows]
    return fmean(max(seconds) / min(seconds) for seconds in places)


def _at_least(text: str, value: float, bound: float) -> Claim:
    return Claim(text=f"{text} (at least)", value=value, bound=bound, holds=value >= bound)


def _at_most(text: str, value: float, bound: float) -> Claim:
    return Claim(text=f"{text} (at most)", value=value, bound=bound, holds=value <= bound)


@click.command()
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--steps", type=int, help="Steps of a run; default: those of --compare.")
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the runs here.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the record goes.")
def main(seeds: str, steps: int | None, runs: Path | None, out: Path | None) -> None:
    """Measure the claims and write their record."""
    folder = out or results_folder("stall_and_loss")
    reporter = Reporter()
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    try:
        rows = measure(
            TrainSettings(steps=steps).for_comparison(),
            runs or Path("runs") / f"claims-{time.strftime('%Y%m%d-%H%M%S')}",
            [int(seed) for seed in seeds.split(",")],
            reporter,
        )
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    claims = claims_of(rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "record.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / "README.md", report(rows, claims))
    record = {"claims": [asdict(claim) for claim in claims], "started": started, **provenance()}
    write_json(folder / "claims.json", record)
    reporter.say("\n" + report(rows, claims))
    if not all(claim.holds for claim in claims):
        raise click.ClickException(f"not every claim holds here; see {folder}")


if __name__ == "__main__":
    main()
