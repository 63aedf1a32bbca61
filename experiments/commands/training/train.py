"""``zenflow train``: a run, a comparison of four, or the rest of one that was ended."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from experiments.commands.answer import Answer
from experiments.commands.command import Command, flags_were_right, option
from experiments.commands.flag_types import FILE, KNOWN_FOLDER, PATH
from experiments.commands.training.config_file import (
    read_config_file,
    said_of_rates,
    settle_auto,
    tuned_for,
    with_flags,
)
from experiments.commands.training.train_flags import (
    given_flags,
    given_tuning,
    train_flags,
    tuning_flags,
)
from experiments.training.parts.files.results import others_in
from experiments.training.parts.files.runlock import LOCK, locked
from experiments.training.parts.first_checks import check_first
from experiments.training.parts.models.fine_tuning import told_defaults, train_defaults
from experiments.training.parts.ranks.launched import Launched, resume_line
from experiments.training.run.intention import intention
from experiments.training.settings.paths import located
from experiments.training.settings.training import TrainSettings
from zenflow.errors import ConfigError

RUNS = Path("runs")
"""Folder of runs without --out, below the working directory."""


@click.command(
    cls=Command,
    examples=[
        "zenflow train --compare --model mini --out runs/compared",
        "zenflow train --model Qwen/Qwen2.5-0.5B --data my_texts/ --auto --out runs/tuned",
        "zenflow train --resume runs/tuned",
    ],
)
@option(
    "--compare", is_flag=True, section="Run",
    help="Run on_device, zero_offload, zenflow_paper and zenflow on the same seed and data.",
)  # fmt: skip
@option("--out", type=PATH, section="Run", help="Directory of the results, new or empty.")
@option("--overwrite", is_flag=True, section="Run",
        help="Replace an earlier run's results in --out.")  # fmt: skip
@option(
    "--resume", type=KNOWN_FOLDER, section="Run",
    help="Go on with the run in this directory; its settings are kept.",
)  # fmt: skip
@option(
    "--config", "config_file", type=PATH, section="Run",
    help="TOML or JSON with settings, or a DeepSpeed JSON; flags win over it.",
)  # fmt: skip
@option(
    "--replay", type=FILE, section="Run",
    help="Repeat the tuned run of this decisions.jsonl, bit for bit on a CPU.",
)  # fmt: skip
@tuning_flags
@train_flags
@click.pass_context
def train(
    context: click.Context,
    /,
    *,
    compare: bool,
    out: Path | None,
    overwrite: bool,
    resume: Path | None,
    config_file: Path | None,
    replay: Path | None,
    **flags: Any,
) -> Answer:
    """Train a model and leave its records, trace, picture and checkpoint in a directory.

    With nothing given, a small decoder learns this Python's own source code, byte by byte.
    """
    del flags  # read from the context, which knows which of them were given
    with Launched.here().telling_once():
        return _train(context, compare, out, overwrite, resume, config_file, replay)


def _train(
    context: click.Context,
    compare: bool,
    out: Path | None,
    overwrite: bool,
    resume: Path | None,
    config_file: Path | None,
    replay: Path | None,
) -> Answer:
    place = Launched.here()
    if resume is not None:
        elsewhere = {"--out": out, "--config": config_file, "--replay": replay}
        settings, compare = _resumed_settings(context, resume, elsewhere, compare)
        folder, stated = resume, None
    else:
        settings, stated = _new_settings(context, config_file, replay, compare)
        folder = _new_folder(out, _label(settings, compare))
    goes_on = resume is not None or replay is not None
    given = given_flags(context)[0]
    is_asked = "parallel" in given if goes_on else settings.parallel is not None
    place.check(settings.parallel, is_asked=is_asked)
    flags_were_right(context)
    check_first(settings)
    if stated is not None:
        settings = _with_defaults(settings, stated, compare)
    try:
        # Of several ranks the first one has the folder, and tells the others which it is.
        with locked(folder) if place.rank == 0 else nullcontext():
            if resume is None and place.rank == 0:
                _check_folder(folder, overwrite, settings.replay)
            if compare and place.rank == 0:
                click.echo(intention(settings))  # at once: torch takes seconds to load
            from experiments.training.run.launch import launch  # loads torch, which help must not

            code, record = launch(
                settings,
                folder,
                compare=compare,
                resume=resume is not None,
                overwrite=overwrite and resume is None,
            )
            return Answer(record=record if place.rank == 0 else None, code=code)
    except OSError as error:
        raise click.ClickException(_not_written(folder, error)) from error


def _label(settings: TrainSettings, compare: bool) -> str:
    if compare:
        return "compare"
    return settings.label if settings.replay is None else "replay"


def _new_settings(
    context: click.Context, config_file: Path | None, replay: Path | None, compare: bool
) -> tuple[TrainSettings, Mapping[str, Any] | None]:
    """Return settings, and what of them a file or a flag states; None where all of it is."""
    settings, knobs = given_flags(context)
    tuning = given_tuning(context)
    if replay is not None:
        changes = {**settings, **knobs, **tuning}
        return _replayed_settings(replay, config_file, compare, changes), None
    settings |= tuning
    if compare and "strategy" in settings:
        raise ConfigError("--compare runs its own four strategies: leave out --strategy")
    if compare and "state_dir" in settings:
        raise ConfigError("--compare runs four strategies, and a folder has the states of one run")
    if not compare and settings.get("start_steps"):
        raise ConfigError("--start-steps is for --compare: a single run is its own start")
    values: dict[str, Any] = {}
    if config_file is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values, file_knobs = read_config_file(config_file)
        knobs = {**file_knobs, **knobs}
        told = [tuned_for(config_file), said_of_rates(config_file, values, settings)]
        for words in [*(f"Note: {warning.message}" for warning in caught), *told]:
            if words is not None:
                click.echo(words, err=True)
    try:
        values, knobs = settle_auto(with_flags(values, settings), knobs)
        return TrainSettings(**located(values), knobs=knobs), values
    except ConfigError as error:
        if config_file is None:
            raise
        raise ConfigError(f"with the settings of {config_file}, {error}") from error


def _with_defaults(
    settings: TrainSettings, stated: Mapping[str, Any], compare: bool
) -> TrainSettings:
    """Return settings with what follows from the model, or from a comparison, where not stated."""
    defaults = train_defaults(settings.model, stated)
    if compare:
        defaults.pop("epochs", None)  # a comparison has a length of its own
    if defaults and Launched.here().rank == 0:
        click.echo(told_defaults(defaults))
    made = replace(settings, **defaults)
    return made.for_comparison() if compare else made


def _replayed_settings(
    replay: Path, config_file: Path | None, compare: bool, changes: dict[str, Any]
) -> TrainSettings:
    from experiments.training.run.tuned.replay import replay_settings

    if compare or config_file is not None:
        raise ConfigError(
            "--replay takes every setting from the run's own file, and repeats one run: leave out "
            f"{'--compare' if compare else '--config'}"
        )
    return replay_settings(replay, changes)


def _new_folder(out: Path | None, label: str) -> Path:
    folder = out or RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out must be a directory, but {folder} is a file: choose another")
    return folder


def _check_folder(folder: Path, overwrite: bool, replay: str | None) -> None:
    """Refuse a folder with anything in it, but for an earlier run that is to be replaced.

    Raises:
        ConfigError: There is something.
    """
    if overwrite and (others := others_in(folder)):
        raise ConfigError(
            f"--overwrite replaces a run, but {others[0]} is no part of one: move it, or choose "
            "another --out"
        )
    if overwrite and replay is not None and folder.resolve() in Path(replay).resolve().parents:
        raise ConfigError(
            f"--overwrite would remove the run in {folder} that --replay repeats: choose another "
            "--out"
        )
    if not overwrite and any(path.name != LOCK for path in folder.iterdir()):
        raise ConfigError(
            f"--out must be new or empty, but {folder} is not: choose another, replace an earlier "
            f"run with --overwrite, or go on with it by --resume {folder}"
        )


def _not_written(folder: Path, error: OSError) -> str:
    return (
        f"{error.filename or folder}: {error.strerror or error}. The run in {folder} can go on "
        f"from its last checkpoint, if it has one, once that is mended: {resume_line(folder)}"
    )


def _resumed_settings(
    context: click.Context,
    folder: Path,
    elsewhere: dict[str, Path | None],
    compare: bool,
) -> tuple[TrainSettings, bool]:
    """Return the settings of the run in ``folder``, with this command's flags on top."""
    given = [flag for flag, path in elsewhere.items() if path is not None]
    if given:
        raise ConfigError(
            "--resume takes directory and settings from the run itself: leave out "
            + " and ".join(given)
        )
    path = folder / "config.json"
    record = _config_record(path)
    saved = dict(record["settings"])
    was_comparison = "compare" in record
    if compare and not was_comparison:
        raise ConfigError(f"{folder} holds a single run: leave out --compare to resume it")
    settings, knobs = given_flags(context)
    settings |= given_tuning(context)
    if {"steps", "epochs"} & settings.keys():
        saved.update(steps=None, epochs=None)
    saved["knobs"] = {**saved.get("knobs", {}), **knobs}
    try:
        return TrainSettings.from_dict({**saved, **located(settings)}), was_comparison
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"with the settings of {path}, {error}") from error


def _config_record(path: Path) -> dict[str, Any]:
    """Return a run's config.json.

    Raises:
        ConfigError: It is missing, or is not what a run writes.
    """
    rule = f"--resume needs a directory that a run has written, but {path} can't be read"
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{rule} ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{rule} as JSON ({error}): restore it from a copy") from error
    settings = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("knobs", {}), dict):
        raise ConfigError(
            f"{path} must hold an object with the run's settings and their knobs, and holds "
            "something else: restore it from a copy"
        )
    return dict(record)
