"""``zenflow tune``: searches knobs before a run, in the simulator or with short real runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.answer import Answer, Exit
from experiments.commands.command import OUTPUT, Command, flag_of, given, option
from experiments.commands.flag_types import NEW_FOLDER, PATH
from experiments.commands.prediction.request_flags import request_flags
from experiments.commands.training.config_file import read_config_file, with_flags
from experiments.commands.training.train_flags import KNOB_NAMES, given_flags, train_flags
from experiments.output.target import check_folder
from experiments.request.hardware import hardware_of
from experiments.request.request import MACHINE, Request
from experiments.request.workload import notes_on, workload_of
from experiments.training.parts.first_checks import check_first, trainable_name
from experiments.training.parts.models.fine_tuning import fine_tuning, train_defaults
from experiments.training.settings.field import settings_of
from experiments.training.settings.paths import located
from experiments.training.settings.training import TrainSettings
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError, NoRoomError

if TYPE_CHECKING:
    from autotune.constraints import Constraints
    from autotune.offline.backends import AbstractBackend
    from autotune.offline.trial_loop import TuningTask
    from autotune.space import SearchSpace
    from sim.hardware.profile import HardwareProfile

_GIGA = 1e9
_STUDY = "Study"
"""Heading of flags on where a study is kept, and what its runs are."""
_NOT_TUNED = ("strategy", "seed", "steps", "epochs", "start_steps", "save_every",
              "save_minutes", "eval_every", "eval_batches", "timeline_steps")  # fmt: skip
"""Flags of `zenflow train` that a short run of one strategy has no use for."""
_SHARED = ("model", "batch_size", "sequence", "grad_accum", "dtype", "checkpointing", "gradients")
"""Flags of `zenflow train` that a simulation takes too."""


def _flags_of(decorator: Callable[..., Any]) -> dict[str, click.Parameter]:
    """Return the flags that a decorator gives a command, by name."""

    @click.command()
    @decorator
    def command(**flags: Any) -> None:
        del flags

    return {str(flag.name): flag for flag in command.params}


_TRAIN = {k: v for k, v in _flags_of(train_flags).items() if k not in _NOT_TUNED}
_OTHER = [item.name for item in settings_of(Request).values() if item.section != MACHINE]
_SIMULATE = {k: v for k, v in _flags_of(request_flags(without=_OTHER)).items() if k not in _TRAIN}


@click.command(
    cls=Command,
    name="tune",
    examples=[
        "zenflow tune --model Qwen/Qwen2.5-0.5B --gpu rtx4090 --out runs/tuned",
        "zenflow tune --backend measured --model mini --trials 20 --out runs/tuned",
    ],
)
@option(
    "--backend", type=click.Choice(("simulated", "measured")), default="simulated",
    show_default=True, section="Search",
    help="Predict each setting, or run it for a few windows.",
)  # fmt: skip
@option(
    "--objective", "objectives", multiple=True, default=("goodput",), section="Search",
    help="goodput (the default), step_seconds, stall_seconds, staleness, device_bytes or "
    "host_bytes; given several times: a Pareto front.",
)  # fmt: skip
@option(
    "--sampler", default="tpe", show_default=True, section="Search",
    help="tpe, random, gp, cmaes, nsgaii, qmc, or grid for brute force.",
)  # fmt: skip
@option("--seed", type=click.IntRange(min=0), default=0, show_default=True, section="Search",
        help="Seed of the sampler.")  # fmt: skip
@option("--trials", type=int, default=100, show_default=True, section="Search",
        help="Settings to try, in all.")  # fmt: skip
@option("--timeout", type=float, section="Search",
        help="Seconds after which no other trial begins.")  # fmt: skip
@option("--workers", type=int, default=1, show_default=True, section="Search", help="Processes.")
@option("--device-memory", type=float, section="Limits", help="Most GB of one device.")
@option("--host-memory", type=float, section="Limits", help="Most GB of the host.")
@option("--largest-staleness", type=int, section="Limits", help="Most steps, S + 1.")
@option("--smallest-captured", type=float, section="Limits",
        help="Least share of energy on the device.")  # fmt: skip
@option("--storage", section=_STUDY,
        help="File (study.journal) or database (sqlite:///a.db) of the study.")  # fmt: skip
@option("--study-name", default="zenflow", show_default=True, section=_STUDY,
        help="Name of the study in the storage.")  # fmt: skip
@option("--out", type=NEW_FOLDER, section=OUTPUT, help="Results go here.")
@option("--config", "config_file", type=PATH, section=_STUDY,
        help="Settings of the runs, as of `zenflow train`; flags win over it.")  # fmt: skip
@click.pass_context
def tune_command(context: click.Context, /, **flags: Any) -> Answer:
    """Search the knobs of a model on a machine, and write them as a file for `zenflow train`.

    What is tuned is said by the flags of `zenflow simulate` (there batches of 4 x 1024 tokens
    unless given), or with --backend measured by those of `zenflow train`. A knob that is given is
    not searched. With a --storage the same command again goes on.
    """
    task, settings = _task(context, flags)
    from experiments.search.results import record_of, run_study  # load Optuna, unlike a help

    out = flags["out"] or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-tune"
    check_folder(out)
    if flags["backend"] == "simulated":
        request = _request(flags)
        hardware, _ = hardware_of(request)
        for note in notes_on(workload_of(request, hardware), hardware):
            click.echo(f"Note: {note}", err=True)
    try:
        result = run_study(
            task, settings, out, num_workers=flags["workers"], timeout=flags["timeout"]
        )
    except NoRoomError as error:
        remedy = _remedy(context, flags, task)
        raise NoRoomError(f"{error}{remedy} {_planned(context, flags)}".strip()) from error
    record = {"folder": str(out), **record_of(result)}
    if result.interrupted:
        return Answer(record=record, code=Exit.INTERRUPTED)
    planned = _planned(context, flags)
    return Answer(
        record={**record, "plan": planned or None},
        show=lambda: click.echo(planned, nl=bool(planned)),
    )


tune_command.params.extend({**_TRAIN, **_SIMULATE}.values())


def _task(context: click.Context, flags: dict[str, Any]) -> tuple[TuningTask, dict[str, Any]]:
    """Return the tuned task, and the settings to write beside the knobs that are found.

    Raises:
        ConfigError: A flag is of the other backend, or says what can't be.
    """
    from autotune.offline.trial_loop import TuningTask

    _refuse_strangers(context, flags["backend"])
    backend, constraints, settings = _backend(context, flags)
    if flags["backend"] == "measured" and flags["workers"] > 1:
        raise ConfigError(
            f"--workers {flags['workers']} would run on one machine and slow each other: give "
            "other machines the same command, with a database as --storage"
        )
    task = TuningTask(
        backend=backend,
        space=_space(settings["zenflow"], measured=flags["backend"] == "measured"),
        objectives=flags["objectives"],
        constraints=constraints,
        sampler=flags["sampler"],
        seed=flags["seed"],
        num_trials=flags["trials"],
        study_name=flags["study_name"],
        storage=flags["storage"],
    )
    return task, settings


def _refuse_strangers(context: click.Context, backend: str) -> None:
    """Refuse flags that the backend would not look at."""
    if backend == "simulated":
        strangers = [name for name in _TRAIN if name not in (*_SHARED, *KNOB_NAMES)]
        strangers, other = [*strangers, "config_file"], "measured"
    else:
        strangers, other = list(_SIMULATE), "simulated"
    own = given(context)
    for name in strangers:
        if name in own:
            raise ConfigError(
                f"{flag_of(context, name)} is for --backend {other}: leave it out, or change "
                "--backend"
            )


def _backend(
    context: click.Context, flags: dict[str, Any]
) -> tuple[AbstractBackend, Constraints, dict[str, Any]]:
    """Return the backend, the constraints, and what was given for a config file."""
    from autotune.constraints import Constraints

    limits = Constraints(
        device_bytes=_bytes(flags["device_memory"]),
        host_bytes=_bytes(flags["host_memory"]),
        largest_staleness=flags["largest_staleness"],
        smallest_captured=flags["smallest_captured"],
    )
    settings, knobs = given_flags(context)
    settings = {name: value for name, value in settings.items() if name not in _NOT_TUNED}
    if flags["backend"] == "measured":
        from experiments.search.measured_backend import MeasuredBackend

        if flags["config_file"] is not None:
            from_file, file_knobs = read_config_file(flags["config_file"])
            settings, knobs = with_flags(from_file, settings), {**file_knobs, **knobs}
        settings["strategy"] = "zenflow"
        made = TrainSettings(**located(settings), knobs=knobs)
        check_first(made)
        defaults = train_defaults(made.model, settings)
        made = replace(made, **defaults)
        settings = {**defaults, **settings}
        settings |= {"model": made.model, "data": made.data, "eval_data": made.eval_data}
        return MeasuredBackend(made), limits, {**settings, "zenflow": knobs}
    from autotune.offline.backends import SimulatedBackend

    base = ZenFlowConfig.preset("zenflow", **knobs)
    request = _request(flags)
    hardware, _ = hardware_of(request)
    workload = workload_of(request, hardware)
    releases = flags["gradients"] != "keep"
    backend = SimulatedBackend(workload, hardware, releases=releases, base=base)
    model = trainable_name(request.model)
    settings = {
        "strategy": "zenflow",
        "model": model,
        **fine_tuning(model),
        "batch_size": workload.batch_size,
        "sequence": workload.sequence,
        "grad_accum": workload.accumulation,
        "dtype": workload.dtype,
        "checkpointing": workload.checkpointing,
        "gradients": "release" if releases else "keep",
        "zenflow": {"min_split_elements": base.min_split_elements, **knobs},
    }
    return backend, _likely(limits, hardware), settings


def _likely(limits: Constraints, hardware: HardwareProfile) -> Constraints:
    """Return the limits within which a setting is likely to fit, as `zenflow plan` has them."""
    from sim.memory.chance import likely_need
    from sim.planning.options import default_reserve

    memory, reserve = hardware.device.memory.value, default_reserve(hardware)
    room = {"device.memory": min(likely_need(memory), memory - reserve)}
    if hardware.device.is_cpu:
        room = {}
    host = {"host.dram_bytes": hardware.host.dram_bytes.value - reserve}
    return limits.within(hardware.with_values({**room, **host}))


def _planned(context: click.Context, flags: Mapping[str, Any]) -> str:
    """Return the settings left out, and `zenflow plan`'s advice; an empty text if runs are real.

    Checkpointing and how gradients leave are held as they were given.
    """
    if flags["backend"] != "simulated":
        return ""
    from experiments.commands.prediction.find_text import setting_text
    from sim.planning.choice import Chooser
    from sim.planning.chunks import with_chunks

    request = _request(flags)
    hardware, _ = hardware_of(request)
    given_recomputation = "checkpointing" in given(context)
    chooser = Chooser(
        workload_of(request, hardware),
        hardware,
        checkpointing=request.checkpointing if given_recomputation else None,
        releases=flags["gradients"] != "keep",
    )
    choice = chooser.choose()
    if (better := with_chunks(chooser, choice)) is not None:
        _, choice = better
    if choice.shown is None:
        return "`zenflow plan` finds nothing that fits this machine either."
    does = "recommends" if choice.recommended else "finds nothing much likelier to fit than"
    held = "" if given_recomputation else ", checkpointing"
    return (
        f"Micro-batches{held} and strategy were not searched. `zenflow plan --trainer "
        f"{request.trainer}`, which does that, {does}: {setting_text(choice.shown)}."
    )


def _remedy(context: click.Context, flags: dict[str, Any], task: TuningTask) -> str:
    """Return the changes that make a simulated model fit, where no setting fits."""
    if flags["backend"] != "simulated":
        return ""
    from experiments.commands.prediction.tune_remedy import remedy

    return remedy(
        _request(flags),
        lambda other: _backend(context, {**flags, **asdict(other)})[:2],
        task.space,
        bounds_host=flags["host_memory"] is not None,
    )


def _request(flags: Mapping[str, Any]) -> Request:
    if flags["model"] is None:
        raise ConfigError("a simulation needs a model: give --model qwen2.5-0.5b, say")
    return Request.of(flags)


def _bytes(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * _GIGA


def _space(knobs: dict[str, Any], *, measured: bool) -> SearchSpace:
    """Return the search space, in which every knob that is given has its one value.

    It has every value that `zenflow plan` tries.
    """
    from autotune.space import SearchSpace
    from sim.planning.grid import INTERVALS, KS

    if knobs.get("select_strategy", "step") != "step":
        raise ConfigError(
            f"select_strategy {knobs['select_strategy']!r} can't be tuned: give selections in "
            "steps (select_interval)"
        )
    if knobs.get("update_rule") == "published":
        raise ConfigError(
            "the published rule can't be tuned, as what its late updates cost is not known: leave "
            "out update_rule"
        )
    space = SearchSpace()
    fixed: dict[str, Any] = {
        "topk_ratios": tuple(sorted({*space.topk_ratios, *KS})),
        "update_intervals": tuple(sorted({*space.update_intervals, *INTERVALS})),
        **({"select_intervals": (100,)} if measured else {}),
    }
    for field, name in zip(fields(space), space.values, strict=True):
        if name in knobs:
            fixed[field.name] = (knobs[name],)
    return replace(space, **fixed)
