"""``zenflow calibrate`` and ``zenflow validate``. Their help loads no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.answer import Answer
from experiments.commands.command import OUTPUT, Command, option
from experiments.commands.flag_types import (
    KNOWN_FILE,
    KNOWN_FOLDER,
    NEW_FILE,
    NEW_FOLDER,
    PICTURE,
    LinkRates,
)
from experiments.output.target import check_folder
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from experiments.calibration.calibrate import Calibration
    from sim.hardware.profile import HardwareProfile

_CACHED = 1.5
"""Times the later writes' rate from which on the first ones' is told: a cache has them."""
_DTYPES = ("float32", "bfloat16")
_MACHINE, _MEASURED = "Machine", "Measurement"
"""Headings of the helps."""


@click.command(
    cls=Command,
    examples=[
        "zenflow calibrate --out mine.json",
        "zenflow calibrate --drive /nvme --out mine.json",
        "zenflow calibrate --from-trace runs/mine --start mine.json --out refined.json",
    ],
)
@option("--out", type=NEW_FILE, required=True, section=OUTPUT,
        help="Where the profile goes, a JSON file.")  # fmt: skip
@option("--device", default="auto", show_default=True, section=_MACHINE,
        help="auto, cpu or cuda.")  # fmt: skip
@option("--dtype", type=click.Choice(_DTYPES), section=_MACHINE,
        help="Of parameters; default: float32 on a CPU, else bfloat16.")  # fmt: skip
@option("--link-gbps", type=LinkRates(), section=_MACHINE,
        help="Emulated link of a CPU in GB/s.")  # fmt: skip
@option("--host-threads", type=click.IntRange(min=1), section=_MACHINE,
        help="Threads of the host update; default: all cores.")  # fmt: skip
@option("--turns", type=click.IntRange(min=1), default=4, show_default=True, section=_MEASURED,
        help="Turns of each short run.")  # fmt: skip
@option(
    "--drive", type=click.Path(path_type=Path, file_okay=False), section=_MEASURED,
    help="Measure the drive of this folder too, by a file of 2 GiB, for states on a drive.",
)  # fmt: skip
@option(
    "--from-trace", "traces", type=click.Path(path_type=Path, exists=True), multiple=True,
    section=_MEASURED,
    help="Refine on this run's directory in place of short runs; may be given several times.",
)  # fmt: skip
@option("--start", type=KNOWN_FILE, section=_MEASURED,
        help="With --from-trace: the profile to refine.")  # fmt: skip
def calibrate(**flags: Any) -> Answer:
    """Measure this machine in minutes and write its hardware profile."""
    from experiments.calibration.drive import check_drive
    from sim.hardware.file import content_of, write_profile

    if flags["drive"] is not None:
        check_drive(flags["drive"])
    if flags["traces"]:
        profile = _from_traces(flags)
        click.echo(f"refined on {len(flags['traces'])} runs")
    else:
        from experiments.calibration.findings import findings

        done = _calibrate(flags)
        profile = done.profile
        click.echo(findings(done))

    if flags["drive"] is not None:
        profile = _with_drive(profile, flags["drive"])
    write_profile(profile, flags["out"])
    return Answer(
        record={"file": str(flags["out"]), "profile": content_of(profile)},
        show=lambda: click.echo(
            f"profile: {flags['out']}; use it as in zenflow simulate --profile {flags['out']}, or "
            f"let zenflow train --auto --profile {flags['out']} start from it"
        ),
    )


def _with_drive(profile: HardwareProfile, folder: Path) -> HardwareProfile:
    """Return a profile with the drive of a folder, and say its rates."""
    from experiments.calibration.drive import measure_drive

    rates = measure_drive(folder)
    cached = ""
    if rates.first_write > _CACHED * rates.write:
        cached = f"; {rates.first_write / 1e9:.3g} GB/s at first, so that a cache was full later"
    direct = "" if rates.is_direct else ". Access was not direct: the system's cache had a part"
    click.echo(
        f"drive of {folder}: reads {rates.read / 1e9:.3g} GB/s, writes {rates.write / 1e9:.3g} "
        f"GB/s{cached}, both at once {rates.both / 1e9:.3g} GB/s together{direct}. A cache of "
        "more than 2 GiB does not show."
    )
    return replace(profile, nvme=rates.to_nvme(folder))


def _calibrate(flags: dict[str, Any]) -> Calibration:
    from experiments.calibration.calibrate import CalibrationOptions
    from experiments.calibration.calibrate import calibrate as run
    from experiments.output.stages import Stages

    options = CalibrationOptions.of(
        flags["device"], flags["dtype"], link=flags["link_gbps"], turns=flags["turns"],
        host_threads=flags["host_threads"],
    )  # fmt: skip
    return run(options, Stages())


def _from_traces(flags: dict[str, Any]) -> HardwareProfile:
    from experiments.calibration.runs import observation_of
    from sim.fitting.refine import refine
    from sim.hardware.file import read_profile

    if flags["start"] is None:
        raise ConfigError("--from-trace refines a profile: name it with --start")
    profile = read_profile(flags["start"])
    return refine(profile, [observation_of(folder) for folder in flags["traces"]]).profile


@click.command(
    cls=Command,
    examples=[
        "zenflow validate --profile mine.json --out runs/validation",
    ],
)
@option("--profile", type=KNOWN_FILE, section=_MACHINE,
        help="What zenflow calibrate wrote; without it this calibrates first.")  # fmt: skip
@option("--device", default="auto", show_default=True, section=_MACHINE,
        help="auto, cpu or cuda.")  # fmt: skip
@option("--dtype", type=click.Choice(_DTYPES), section=_MACHINE,
        help="Of parameters; default: float32 on a CPU, else bfloat16.")  # fmt: skip
@option("--turns", type=click.IntRange(min=1), default=8, show_default=True, section=_MEASURED,
        help="Turns of each run.")  # fmt: skip
@option("--force", is_flag=True, section=_MEASURED,
        help="Measure again what is done already.")  # fmt: skip
@option("--record", type=KNOWN_FOLDER, section=_MEASURED,
        help="Measure nothing: predict a record's runs again.")  # fmt: skip
@option("--out", type=NEW_FOLDER, section=OUTPUT,
        help="The record's folder; default: one below evidence/results of a clone.")  # fmt: skip
@option("--plot", type=PICTURE, section=OUTPUT, help="With --record: draw it here.")
def validate(**flags: Any) -> Answer:
    """Predict runs that calibrated nothing, and show how far off the predictions are.

    This is zenflow study validation with a device, a profile and a folder of choice.
    """
    from experiments.commands.study_session import code_of, facts
    from experiments.lab.columns import rich
    from experiments.lab.page import FORMER
    from experiments.output.bar import wide_console
    from experiments.output.plots import save_figure
    from experiments.validation.study import STUDY, read_validation

    record = read_validation(flags["record"] or _measured(flags))
    data = record.data(STUDY)
    if flags["record"] is not None and flags["plot"] is not None:
        save_figure(STUDY.draw(data), flags["plot"])

    def show() -> None:
        for table in STUDY.tables(data):
            wide_console().print(rich(table))
        click.echo(STUDY.about(data))
        if not record.is_of(STUDY):
            click.echo(FORMER.replace("*", ""))
        if flags["record"] is None:
            click.echo(f"record: {record.folder}")

    return Answer(
        record={**facts(record), "is_former": not record.is_of(STUDY)},
        show=show,
        code=code_of(record.findings),
    )


def _measured(flags: dict[str, Any]) -> Path:
    """Return the folder of the record, made now but for what is there."""
    from rich.console import Console

    from experiments.commands.study_session import shown_progress
    from experiments.lab.record import RECORD
    from experiments.lab.runner import Runner
    from experiments.lab.study import Scope
    from experiments.output.provenance import results_folder
    from experiments.validation.study import validation
    from sim.hardware.file import read_profile

    folder: Path = (flags["out"] or results_folder("validation")).absolute()
    check_folder(folder)
    if flags["force"] and any(folder.glob("*")) and not (folder / RECORD).is_file():
        raise ConfigError(f"--force replaces a record, and {folder} holds none: name another one")
    profile = None if flags["profile"] is None else read_profile(flags["profile"])
    study = validation(flags["device"], flags["dtype"], flags["turns"], profile)
    runner = Runner(
        study=study, scope=study.scope(Scope()), folder=folder,
        kept=folder.with_name(f".{folder.name}.partial"), force=flags["force"],
    )  # fmt: skip
    console = Console(stderr=True, highlight=False)
    try:
        with shown_progress(console, "validation") as runner.progress:
            runner.run()
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on with what {runner.kept} keeps.")
        raise
    if not runner.made:
        console.print("Done already: --force measures again.")
    return folder
