"""``zenflow plan``: which setting to use on a machine. Runs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.answer import Answer, Exit
from experiments.commands.command import OUTPUT, Command, given, option
from experiments.commands.flag_types import COUNT, Memory, Positive
from experiments.commands.prediction.listing import LISTS, listed
from experiments.commands.prediction.request_flags import draws_flag, request_flags
from experiments.commands.setting_flags import setting_flag
from experiments.output.patience import Patience
from experiments.request.hardware import hardware_of
from experiments.request.request import Request
from experiments.request.workload import as_traced, notes_on, notes_on_positions, workload_of
from experiments.training.settings.field import settings_of
from experiments.training.settings.training import TrainSettings
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from sim.planning.plan import Plan

_FILE_WIDTH = 120
_NOT_ASKED = (
    "attention", "loss", "offload_activations", "strategy", "gradients", "lora_rank",
    "lora_targets", "resident_layers",
)  # fmt: skip
"""Fields of a request that a plan has no use for, or searches."""
_FINE_TUNING = "times are those of `zenflow finetune`; --trainer loop is a loop of your own"


@click.command(
    cls=Command,
    name="plan",
    examples=[
        "zenflow plan --model Qwen/Qwen2.5-0.5B --gpu rtx4090",
        "zenflow plan --model llama-2-7b --gpu rtx4090 --tokens 10M --usd-per-hour 0.4",
        "zenflow plan --list gpus",
    ],
)
@request_flags(
    without=_NOT_ASKED,
    defaults={
        "checkpointing": "all and none are compared",
        "parallel": "the better of both",
        "stream": "where nothing else surely fits, or that is faster",
        "trainer": "trl where one device runs `zenflow finetune`, else loop",
        "state_on_drive": "where the host has too little memory",
    },
)
@setting_flag(
    settings_of(ZenFlowConfig)["host_state"], section="Strategy",
    default="float32, and compact where nothing fits with that",
)  # fmt: skip
@setting_flag(settings_of(ZenFlowConfig)["gradient_link"], section="Strategy", default="model")
@setting_flag(settings_of(ZenFlowConfig)["uploads"], section="Strategy", default="all")
@setting_flag(settings_of(ZenFlowConfig)["second_moment"], section="Strategy", default="element")
@setting_flag(
    settings_of(TrainSettings)["chunked_loss"], section="Compute",
    default="where a step fits or is faster with that",
)  # fmt: skip
@option("--systems", is_flag=True, section="Strategy",
        help="Show other systems too, which don't run here.")  # fmt: skip
@option(
    "--reserve", type=Memory(zero=True), section="Prediction",
    help="GiB to leave free on each device and on the host; default: 1, or 5% of the device's "
    "memory if that is more.",
)  # fmt: skip
@draws_flag(100)
@option("--tokens", type=COUNT, section="Training",
        help="Say how long training on so many takes.")  # fmt: skip
@option("--usd-per-hour", type=Positive(), section="Training",
        help="Price of the machine, to say what training costs.")  # fmt: skip
@setting_flag(settings_of(TrainSettings)["drive_tbw"], section="Machine")
@option("--data", section="Training", help="Your data, for the command that is printed.")
@option("--list", "kind", type=click.Choice(tuple(LISTS)), section=OUTPUT,
        help="List the names that are known, and plan nothing.")  # fmt: skip
@click.pass_context
def plan_command(context: click.Context, /, **flags: Any) -> Answer:
    """Say which setting to use on a machine, how fast it would be, and the command that runs it.

    --batch-size times --grad-accum is what a step takes on each device; how it is cut into
    micro-batches, checkpointing and the update rule's knobs are searched. From a model's
    configuration and a table of hardware, in seconds, with no GPU and no torch. Times are
    predictions for a steady state, as `zenflow simulate` makes them.

    What is recommended fits with a chance of at least 90%. Where nothing is that likely, the
    likeliest setting is shown with a warning. Exit code 3: nothing fits.
    """
    from experiments.commands.prediction.plan_accuracy import evidence_of
    from experiments.commands.prediction.plan_run import Wishes, fine_tunes, run_command
    from sim.models.workload import TRL
    from sim.planning.plan import plan
    from sim.simulate import STRATEGIES
    from zenflow.config import PRESETS

    if flags["kind"] is not None:
        return listed(flags["kind"])
    if flags["model"] is None:
        raise ConfigError("a plan needs a model: give --model (--list models has names)")
    request = as_traced(Request.of(flags), given(context))
    if request.options and not flags["systems"]:
        raise ConfigError("--float32-master is about other systems: give --systems as well")
    hardware, notes = hardware_of(request)
    workload = workload_of(request, hardware)
    is_alone = hardware.total_devices == 1 and workload.traced is None
    if is_alone and "trainer" not in given(context) and fine_tunes(flags["model"], workload):
        workload = replace(workload, trainer=TRL)
        notes = [*notes, _FINE_TUNING]
    notes = [*notes, *notes_on_positions(request), *notes_on(workload, hardware)]
    with Patience(f"Searching settings of {workload.name}"):
        found = plan(
            workload,
            hardware,
            strategies=STRATEGIES if flags["systems"] else PRESETS,
            checkpointing=flags["checkpointing"],
            reserve=flags["reserve"],
            draws=flags["draws"],
            parallel=request.parallel if "parallel" in given(context) else None,
            reshards=request.reshard_after_forward,
            options=request.options,
            host_state=flags["host_state"],
            gradient_link=flags["gradient_link"] or "model",
            uploads=flags["uploads"] or "all",
            second_moment=flags["second_moment"] or "element",
            chunked_loss=flags["chunked_loss"],
            streams=flags["stream"],
            state_on_drive=flags["state_on_drive"],
        )
    wishes = Wishes(
        model=flags["model"],
        data=flags["data"],
        tokens=flags["tokens"],
        usd_per_hour=flags["usd_per_hour"],
        drive_tbw=flags["drive_tbw"],
    )
    command = run_command(found, wishes)
    shown = found.shown and evidence_of(found.shown, wishes)
    record = {
        **found.to_dict(),
        "evidence": shown and shown.to_dict(),
        "notes": notes,
        "command": command,
        "streamed_command": found.streamed and run_command(found, wishes, found.streamed),
        "on_drive_command": found.on_drive and run_command(found, wishes, found.on_drive),
    }
    return Answer(
        record=record,
        show=lambda: _print(found, notes, wishes),
        code=Exit.NO_ROOM if found.shown is None else Exit.DONE,
    )


def _print(plan: Plan, notes: list[str], wishes: Any) -> None:
    from rich.console import Console

    from experiments.commands.prediction.plan_text import answer, heading, plan_table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a file or a pipe has no width to fit
        console.width = _FILE_WIDTH

    def say(lines: list[str]) -> None:
        for line in lines:
            console.print(line, soft_wrap=not console.is_terminal)

    say(heading(plan, notes))
    if plan.shown is not None or any(option.prediction for option in plan.options):
        console.print(plan_table(plan))
    say(answer(plan, wishes))
