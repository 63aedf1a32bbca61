"""``zenflow sweep``: a prediction for every point of a grid. Runs nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.answer import Answer, Exit
from experiments.commands.command import OUTPUT, Command, given, option
from experiments.commands.flag_types import NEW_FOLDER, Positive
from experiments.commands.prediction.request_flags import request_flags
from experiments.commands.training.train_flags import given_flags, knob_flags
from experiments.output.patience import Patience
from experiments.output.target import check_folder
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from experiments.sweeps.execution.run import Outcome
    from experiments.sweeps.grid import Sweep

_SHOWN = 5


def _all_axes(context: click.Context) -> Answer:
    """Return every axis with its meaning."""
    from experiments.sweeps.axes.kinds import KINDS

    def show() -> None:
        formatter = context.make_formatter()
        for kind in KINDS.values():
            words = f"; one of {', '.join(kind.known)}" if kind.known else ""
            formatter.write_dl([(f"{kind.name:<21}", kind.meaning + words)])
        click.echo(formatter.getvalue(), nl=False)
        click.echo(
            "and any figure of a profile by its dotted name, such as link.latency, in SI units"
        )

    axes = [
        {"name": kind.name, "meaning": kind.meaning, "known": list(kind.known)}
        for kind in KINDS.values()
    ]
    return Answer(record={"axes": axes}, show=show)


def _moved(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Refuse shipped sweeps, which are studies."""
    del parameter
    if value is not None and not context.resilient_parsing:
        raise click.UsageError(
            "shipped sweeps are studies: make them with `zenflow study whatif/NAME`, and list "
            "them with `zenflow study whatif --list`",
            context,
        )


@click.command(
    cls=Command,
    name="sweep",
    examples=[
        "zenflow sweep --model qwen2.5-0.5b --vary gpu=rtx4090,h100 --vary S=1,2,4",
        "zenflow sweep --model qwen2.5-0.5b --gpu rtx4090 --vary dram=50:400:x2 --out runs/memory",
    ],
)
@option(
    "--vary", "axes", multiple=True, metavar="AXIS=VALUES", section="Grid",
    help="An axis, as in gpu=rtx4090,h100 or S=1,2,4 or dram=50:400:50 (steps of 50) or "
    "dram=50:400:x2 (times 2). Give one for each axis.",
)  # fmt: skip
@option("--axes", "list_axes", is_flag=True, section="Grid", help="List all axes.")
@option(
    "--study", "--studies", is_flag=False, flag_value="", hidden=True, expose_value=False,
    callback=_moved,
)  # fmt: skip
@option(
    "--out", type=NEW_FOLDER, section=OUTPUT,
    help="Results go here. The same command with the same folder goes on where it ended.",
)  # fmt: skip
@option(
    "--value", default="step_seconds", show_default=True, section=OUTPUT,
    help="Column that the picture shows.",
)  # fmt: skip
@option(
    "--price", "prices", multiple=True, metavar="PART=USD", section=OUTPUT,
    help="Price of a device, host or link, as in rtx4090=1600; adds a column to the table.",
)  # fmt: skip
@option(
    "--find", metavar="COLUMN", section="Search",
    help="With --rate: the point of least price_usd, or of least value on an axis, that `zenflow "
    "plan` finds fast enough. Strategy, knobs, loss and checkpointing are searched unless given "
    "or varied. Few points are looked at, and no table is left.",
)  # fmt: skip
@option("--rate", type=Positive(), section="Search", help="Tokens/s that --find asks for.")
@option("--workers", type=click.IntRange(min=1), section="Workers",
        help="Processes; default: all cores.")  # fmt: skip
@request_flags()
@knob_flags
@click.pass_context
def sweep_command(context: click.Context, /, **flags: Any) -> Answer:
    """Predict a step for every point of a grid: machines, workloads, settings, in any mixture.

    Leaves a table (Parquet, and CSV up to 100,000 points), where it comes from, and pictures.
    Points that do not fit in memory are rows that say so. Everything is predicted.
    """
    if flags["list_axes"]:
        return _all_axes(context)
    if (flags["find"] is None) != (flags["rate"] is None):
        raise ConfigError("--find and --rate belong together: give both, or neither")
    if flags["find"] is not None:
        return _find(context, flags)
    return _run(context, flags)


def _find(context: click.Context, flags: Mapping[str, Any]) -> Answer:
    """Search the grid, and return what was found."""
    from experiments.commands.prediction.find_text import find_text, found_record
    from experiments.sweeps.planned import HELD
    from experiments.sweeps.prices import parse_prices
    from experiments.sweeps.search import cheapest

    sweep = _sweep(context, flags)
    _say_notes(sweep)
    with Patience(f"Planning up to {sweep.num_points} points") as patience:
        found = cheapest(
            sweep, flags["find"], flags["rate"], parse_prices(flags["prices"]),
            holds=HELD & set(given(context)), say=patience.update,
        )  # fmt: skip
    lines = list(find_text(sweep, flags["find"], flags["rate"], found))
    return Answer(
        record=found_record(sweep, flags["find"], flags["rate"], found),
        show=lambda: click.echo("\n".join(lines)),
        code=Exit.NO_ROOM if found.found is None else Exit.DONE,
    )


def _run(context: click.Context, flags: Mapping[str, Any]) -> Answer:
    from experiments.sweeps.execution.run import run_sweep
    from experiments.sweeps.pictures.outputs import check_value, write_pictures
    from experiments.sweeps.prices import COLUMN, add_prices, parse_prices, unpriced
    from experiments.sweeps.table import table_of, write_frame

    sweep = _sweep(context, flags)
    prices = parse_prices(flags["prices"])
    check_value(flags["value"])
    folder = flags["out"] or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-sweep"
    check_folder(folder)
    _say_notes(sweep)
    outcome = run_sweep(sweep, folder, flags["workers"])
    files = outcome.files
    if len(outcome.found):
        try:
            frame = table_of(sweep, outcome.found)
            if prices:
                if missing := unpriced(frame, prices):
                    click.echo(
                        f"No price is given of {', '.join(missing)}: {COLUMN} is empty there"
                    )
                frame = add_prices(frame, prices)
                write_frame(frame, folder)
            files = [*files, *write_pictures(frame, sweep, flags["value"], folder)]
        except KeyboardInterrupt:
            outcome = replace(outcome, exit_code=Exit.INTERRUPTED)
    return _answer(outcome, sweep, folder, files)


def _say_notes(sweep: Sweep) -> None:
    """Say what is odd about the first point's model and trace; its row tells what is wrong."""
    from experiments.request.workload import notes_on

    with suppress(ConfigError):
        case = sweep.case(0)
        for note in notes_on(case.workload, case.hardware):
            click.echo(f"Note: {note}", err=True)


def _sweep(context: click.Context, flags: Mapping[str, Any]) -> Sweep:
    """Return the sweep that the flags ask for.

    Raises:
        ConfigError: They ask for nothing, or for one thing twice.
    """
    from experiments.request.hardware import BASES
    from experiments.request.request import Request
    from experiments.request.workload import as_traced
    from experiments.sweeps.axes.parsing import parse_axes
    from experiments.sweeps.grid import Sweep

    if not flags["axes"]:
        raise ConfigError(
            "a sweep needs something to vary: give --vary S=1,2,4, say (`zenflow sweep --axes` "
            "lists all axes)"
        )
    axes = parse_axes(flags["axes"])
    own = given(context)
    for axis in axes:
        if axis.kind.target in own:
            raise ConfigError(
                f"--{axis.kind.target.replace('_', '-')} is given and varied: leave one of the "
                "two out"
            )
    names = {axis.name for axis in axes}
    if flags["model"] is None and "model" not in names:
        raise ConfigError("a sweep needs a model: give --model qwen2.5-0.5b, say, or vary it")
    bases = {*BASES} & names
    other = next((name for name in BASES if flags[name]), None)
    if bases and other:
        raise ConfigError(
            f"--{other} and the axis {bases.pop()} both say what the machine is: leave one out"
        )
    return Sweep(
        axes=axes,
        request=as_traced(Request.of(own), own),
        knobs=given_flags(context)[1],
    )


def _answer(outcome: Outcome, sweep: Sweep, folder: Path, files: list[Path]) -> Answer:
    from experiments.sweeps.pictures.outputs import fastest, summary
    from experiments.sweeps.table import counted

    def show() -> None:
        click.echo(summary(sweep, outcome.found, shown=_SHOWN))
        if files:
            click.echo(f"written to {folder}: {', '.join(file.name for file in files)}")
        if outcome.exit_code:
            click.echo(
                f"stopped with {len(outcome.found)} of {sweep.num_points} points, which are kept: "
                f"the same command with --out {folder} goes on"
            )

    record = {
        "folder": str(folder),
        "files": [file.name for file in files],
        "num_points": sweep.num_points,
        "statuses": counted(outcome.found, "status"),
        "fastest": fastest(sweep, outcome.found, shown=_SHOWN),
    }
    return Answer(record=record, show=show, code=outcome.exit_code)
