"""What tuning does to accuracy, measured: held-out loss of tuned runs beside AdamW's.

``python -m experiments.studies.tuned_loss`` goes on training a small decoder over the slow
emulated
link of ``tuning_claims``, tuned, and on the device alone, with the same batches. What a tuned run
decides follows its clock: run it alone. Run again with the same ``--runs``, it goes on where it
was interrupted. Writes ``experiments/results/<date>_tuned_loss_<cpu>/``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autotune.decisions.file import DECISIONS, read_decisions
from experiments.output.files import write_json, write_text
from experiments.output.progress import Reporter
from experiments.output.provenance import provenance, results_folder
from experiments.studies.tuned_goodput.study import SEEDS, begun, link_rates, over, verdict
from experiments.training.run import run
from experiments.training.saved.checkpoint import CHECKPOINTS, latest_checkpoint
from experiments.training.settings import TrainSettings
from experiments.training.stop import StopRequest
from zenflow.errors import ZenFlowError

STEPS = 2000
MOST_EXCESS = 0.01
"""Of the held-out loss over AdamW's."""
_PICTURE = "tuning.png"


def losses(
    settings: TrainSettings, rate: float, seed: int, folder: Path, reporter: Reporter
) -> dict[str, Any]:
    """Return what both runs of a seed end with, and what the tuned one decided.

    Args:
        settings: What both share.
        rate: Of the link, in bytes/s.
        seed: Of the data's order.
        folder: Gets a directory for each.
        reporter: Hears of every step.
    """
    common = replace(settings, schedule="cosine", warmup=0.1, seed=seed)
    row: dict[str, Any] = {"seed": seed}
    tuned = folder / f"auto-{seed}"
    for name, own, place in (
        ("on_device", replace(common, strategy="on_device"), folder / f"on_device-{seed}"),
        ("auto", replace(over(common, rate), controller="both"), tuned),
    ):
        resume = latest_checkpoint(place / CHECKPOINTS) is not None
        with StopRequest() as stop:
            done = run(own, place, reporter=reporter, stop=stop, resume=resume)
        if done.stopped:
            raise KeyboardInterrupt
        row[name] = done.summary["eval_loss"]
    decisions = read_decisions(tuned / DECISIONS).decisions
    return {
        **row,
        "excess": row["auto"] / row["on_device"] - 1,
        "num_decisions": len(decisions),
        "final": str(decisions[-1].new) if decisions else "",
    }


def table(record: Mapping[str, Any]) -> str:
    """Return what a record shows, and whether the aim holds."""
    rows = record["losses"]
    lines = [f"{'seed':<6}{'on_device':>10}{'auto':>10}{'excess':>9}{'decisions':>11}  at the end"]
    lines += [
        f"{row['seed']:<6}{row['on_device']:>10.4f}{row['auto']:>10.4f}{row['excess']:>+9.2%}"
        f"{row['num_decisions']:>11}  {row['final']}"
        for row in rows
    ]
    holds = all(row["excess"] <= MOST_EXCESS and row["num_decisions"] for row in rows)
    lines += [
        "",
        f"Held-out loss after {record['steps']} tuned steps over the slow link within "
        f"{MOST_EXCESS:.0%} of AdamW's on the device for every seed: {verdict(holds)}",
    ]
    return "\n".join(lines)


def run_all(
    settings: TrainSettings, folder: Path, seeds: Sequence[int], reporter: Reporter
) -> dict[str, Any]:
    """Return everything that the record holds."""
    parts, settings = begun(settings, folder, reporter)
    rate = link_rates(parts, settings)["slow"]
    rows = [
        parts.get(f"seed-{seed}", losses, settings, rate, seed, folder, reporter) for seed in seeds
    ]
    return {"steps": settings.steps, "link": rate, "losses": rows}


@click.command(help=__doc__)
@click.option("--seeds", default=len(SEEDS), show_default=True, help="Pairs of runs.")
@click.option("--steps", default=STEPS, show_default=True, help="Of each run.")
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs/tuned-loss"), show_default=True,
    help="Directory of the common start and of the runs.",
)  # fmt: skip
@click.option("--record", type=click.Path(path_type=Path), help="Directory of the record.")
def main(seeds: int, steps: int, runs: Path, record: Path | None) -> None:
    """Run the command."""
    reporter = Reporter()
    settings = TrainSettings(
        lr=3e-4, steps=steps, start_steps=300, device_threads=1, host_threads=1
    )
    try:
        found = run_all(settings, runs, range(seeds), reporter) | provenance()
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    folder = record or results_folder("tuned_loss")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "losses.json", found)
    write_text(folder / "table.txt", table(found) + "\n")
    shutil.copy(runs / "auto-0" / _PICTURE, folder / _PICTURE)
    reporter.say(table(found))


if __name__ == "__main__":
    main()
