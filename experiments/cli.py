"""The console command ``zenflow``. Its help loads neither torch nor any model code."""

from __future__ import annotations

import click

import zenflow
from experiments.commands.calibrate import calibrate, validate
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
from experiments.output.commit import commit
from experiments.output.provenance import versions
from zenflow.host import library


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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99})
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


for _command in (
    finetune,
    train,
    convert_command,
    compare,
    plan_command,
    simulate_command,
    sweep_command,
    calibrate,
    validate,
    tune_command,
    study_command,
    figures_command,
    report_command,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
