"""``zenflow calibrate`` and ``zenflow validate``. Their help loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.command import Command
from experiments.commands.flag_types import FILE, FOLDER, KNOWN_FILE, KNOWN_FOLDER, PATH, LinkRates
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from experiments.calibration.calibrate import Calibration, CalibrationOptions
    from experiments.output.stages import Stages
    from sim.hardware.profile import HardwareProfile

_DTYPES = ("float32", "bfloat16")


@click.command(cls=Command)
@click.option("--out", type=FILE, required=True, help="Where the profile goes, a JSON file.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), help="Default: float32 on a CPU, else bfloat16."
)
@click.option("--link-gbps", type=LinkRates(), help="Emulated link of a CPU in GB/s.")
@click.option("--host-threads", type=click.IntRange(min=1), help="Threads of the host update.")
@click.option(
    "--turns", type=click.IntRange(min=1), default=4, show_default=True, help="Of each short run."
)
@click.option(
    "--from-trace",
    "traces",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Refine on this run's directory in place of short runs; may be given several times.",
)
@click.option("--start", type=KNOWN_FILE, help="With --from-trace: the profile to refine.")
def calibrate(**flags: Any) -> None:
    """Measure this machine in minutes and write its hardware profile."""
    from sim.hardware.file import write_profile

    _check_folder(flags["out"])
    if flags["traces"]:
        profile = _from_traces(flags)
        click.echo(f"refined on {len(flags['traces'])} runs")
    else:
        from experiments.calibration.findings import findings

        done = _calibrate(flags)
        profile = done.profile
        click.echo(findings(done))

    write_profile(profile, flags["out"])
    click.echo(
        f"profile: {flags['out']}; use it as in zenflow simulate --profile {flags['out']}, or let "
        f"zenflow train --auto --profile {flags['out']} start from it"
    )


def _check_folder(path: Path) -> None:
    """Refuse a file that could not be written once everything is measured.

    Raises:
        ConfigError: Its folder is not there.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out must be in a folder that exists, but {path.parent} does not")


def _options(flags: dict[str, Any]) -> CalibrationOptions:
    from experiments.calibration.calibrate import CalibrationOptions
    from experiments.training.settings import TrainSettings
    from experiments.training.setup import choose_device

    device = choose_device(TrainSettings(device=flags["device"], link=flags.get("link_gbps")))
    dtype = flags.get("dtype") or ("float32" if device.type == "cpu" else "bfloat16")
    return CalibrationOptions(
        device=device,
        dtype=dtype,
        link=flags.get("link_gbps"),
        turns=flags["turns"],
        host_threads=flags.get("host_threads"),
    )


def _calibrate(flags: dict[str, Any], stages: Stages | None = None) -> Calibration:
    from experiments.calibration.calibrate import calibrate as run
    from experiments.output.stages import Stages

    return run(_options(flags), stages or Stages())


def _from_traces(flags: dict[str, Any]) -> HardwareProfile:
    from experiments.calibration.runs import observation_of
    from sim.fitting.refine import refine
    from sim.hardware.file import read_profile

    if flags["start"] is None:
        raise ConfigError("--from-trace refines a profile: name it with --start")
    profile = read_profile(flags["start"])
    return refine(profile, [observation_of(folder) for folder in flags["traces"]]).profile


@click.command(cls=Command)
@click.option(
    "--profile",
    type=KNOWN_FILE,
    help="What zenflow calibrate wrote; without it this calibrates first.",
)
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of parameters.")
@click.option(
    "--turns", type=click.IntRange(min=1), default=8, show_default=True, help="Of each run."
)
@click.option("--out", type=FOLDER, help="The record's folder.")
@click.option(
    "--record", type=KNOWN_FOLDER, help="Measure nothing: predict a record's runs again."
)
@click.option("--plot", type=PATH, help="With --record: draw it here.")
def validate(**flags: Any) -> None:
    """Predict runs that calibrated nothing, and show how far off the predictions are."""
    if flags["record"] is not None:
        click.echo(_again(flags["record"], flags["plot"]))
    else:
        click.echo(_validate(flags))


def _again(folder: Path, picture: Path | None) -> str:
    from experiments.studies.validation import study as validation
    from sim.hardware.file import read_profile

    profile = read_profile(folder / validation.PROFILE)
    runs = validation.validate(profile, validation.read_record(folder))
    if picture is not None:
        from experiments.studies.validation.picture import write_picture

        write_picture(runs, profile, picture)
    return validation.table(runs)


def _validate(flags: dict[str, Any]) -> str:
    from experiments.calibration.calibrate import measure_validation
    from experiments.output.files import write_json
    from experiments.output.provenance import provenance, results_folder
    from experiments.output.stages import Stages
    from experiments.studies.validation import study as validation
    from experiments.studies.validation.picture import write_shown
    from sim.hardware.file import read_profile, write_profile

    stages = Stages()
    folder = flags["out"] or results_folder("validation")
    folder.mkdir(parents=True, exist_ok=True)  # not only once everything is measured
    if flags["profile"] is None:
        profile = _calibrate(flags, stages).profile
    else:
        profile = read_profile(flags["profile"])
    observed = measure_validation(profile, _options(flags), stages)
    write_profile(profile, folder / validation.PROFILE)
    write_json(folder / validation.RECORD, validation.record_of(observed, provenance()))
    return f"{write_shown(folder)}\nrecord: {folder}"
