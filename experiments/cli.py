"""The console command ``zenflow``. Its help loads neither torch nor any model code."""

from __future__ import annotations

import click

import zenflow
from experiments.commands.calibrate import calibrate, validate
from experiments.commands.command import Commands
from experiments.commands.compare import compare
from experiments.commands.prediction.plan import plan_command
from experiments.commands.prediction.simulate import simulate_command
from experiments.commands.prediction.sweep import sweep_command
from experiments.commands.prediction.tune import tune_command
from experiments.commands.report import report_command
from experiments.commands.study import figures_command, study_command
from experiments.commands.training.convert import convert_command
from experiments.commands.training.finetune import finetune
from experiments.commands.training.train import train
from zenflow.commit import commit
from zenflow.host import library
from zenflow.provenance import versions


def _show_version(context: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    if value:
        try:
            kernel = library.description()
        except ValueError as error:
            raise click.UsageError(str(error), context) from error
        click.echo(f"zenflow {zenflow.__version__}, commit {commit() or 'unknown'}")
        click.echo(f"host kernel: {kernel}")
        click.echo(f"torch {versions().get('torch', 'is not installed')}")
        context.exit()


GROUPS = {
    "Train": (finetune, train, convert_command),
    "Before a run": (plan_command, simulate_command, sweep_command, tune_command),
    "Measure": (calibrate, validate, compare, report_command),
    "Repeat our results": (study_command, figures_command),
}
"""Commands in the groups and the order of the help."""


@click.group(
    cls=Commands,
    groups=GROUPS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show version, commit, host kernel and torch's version.",
)
def main() -> None:
    """Train with optimizer states on the host, without waiting for them."""


if __name__ == "__main__":
    main()
