"""The command that runs what ``zenflow plan`` recommends."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.commands.training.train_flags import DATA
from experiments.training.parts.models.fine_tuning import FINE_TUNING, written
from experiments.training.parts.models.named import comes_with_weights
from sim.models.table import hub_name

if TYPE_CHECKING:
    from sim.models.workload import Workload
    from sim.planning.options import Option
    from sim.planning.plan import Plan

ROWS = "my_chats.jsonl"
"""File that stands for the user's own rows in commands that are printed."""
STATE_DIR = "/nvme/run1"
"""Folder that stands for the user's own one on a drive."""
_SAVE_SECONDS = 1800.0
_WRAPPERS = {"ddp": "under DistributedDataParallel", "fsdp": "with fully_shard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Flags of the user beside model and machine."""

    model: str
    data: str | None = None
    tokens: float | None = None
    """Number of tokens to train on."""
    usd_per_hour: float | None = None
    drive_tbw: float | None = None
    """Terabytes that the drive's maker warrants."""


def learning_rate(model: str) -> float | None:
    """Return the usual learning rate of fine-tuning a model; None where it trains from scratch."""
    return FINE_TUNING["lr"] if comes_with_weights(hub_name(model)) else None


def fine_tunes(model: str, workload: Workload) -> bool:
    """Return whether `zenflow finetune` is the command for a model: a decoder with weights."""
    is_known = learning_rate(model) is not None
    return is_known and workload.is_causal and workload.dtype != "float16"


def run_command(plan: Plan, wishes: Wishes, option: Option | None = None) -> str | None:
    """Return the command of a setting on one device.

    A decoder with weights is fine-tuned by `zenflow finetune`, and others train by `zenflow
    train`. None if none fits, or if it recomputes a part of the layers, as neither of them does.

    Args:
        plan: The plan.
        wishes: Flags of the user beside model and machine.
        option: Setting to run; None takes the best one on one device.
    """
    if option is None:
        options = [
            *filter(None, (plan.recommended, *plan.per_devices, plan.likeliest)),
        ]
        option = next((option for option in options if option.need.num_devices == 1), None)
    if option is None or not isinstance(option.need.workload.checkpointing, bool):
        return None
    work = option.need.workload
    rate = learning_rate(wishes.model)
    command, recomputes, data = "train", [], DATA
    if fine_tunes(wishes.model, work):
        command, recomputes, data = "finetune", ["--no-checkpointing"], ROWS
    words = ["zenflow", command, "--model", hub_name(wishes.model)]
    words += ["--data", wishes.data or data, "--strategy", option.strategy.name]
    for change in option.changes:
        name, _, value = change.partition("=")
        words += [f"--{name.replace('_', '-')}", value] if value else []
    words += ["--dtype", work.dtype, *(["--checkpointing"] if work.checkpointing else recomputes)]
    words += [] if option.strategy.releases else ["--gradients", "keep"]
    if option.strategy.streams is not None:
        words += ["--stream", *(["--offload-activations"] if work.offloads_activations else [])]
    if option.strategy.state_on_drive:
        words += ["--state-dir", STATE_DIR]
        words += [] if wishes.drive_tbw is None else ["--drive-tbw", f"{wishes.drive_tbw:g}"]
    words += ["--batch-size", str(work.batch_size), "--sequence", str(work.sequence)]
    words += ["--grad-accum", str(work.accumulation)] if work.accumulation > 1 else []
    words += [] if rate is None else ["--lr", written(rate)]
    if work.loss == "chunks" and command == "train":  # TRL's trainer has no other
        words.append("--chunked-loss")
    if wishes.tokens is None:
        words += ["--epochs", "1"]
    else:
        words += ["--steps", str(math.ceil(wishes.tokens / work.tokens_per_step))]
    words += ["--save-every", str(_round_steps(_SAVE_SECONDS / option.step_seconds))]
    return shlex.join([*words, "--out", f"runs/{work.name}"])


def _data_in(command: str) -> str:
    """Return the data that a command names."""
    words = shlex.split(command)
    return words[words.index("--data") + 1]


def _round_steps(count: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20 and so on that is no more than a number.

    >>> [_round_steps(n) for n in (0.3, 4.9, 580)]
    [1, 2, 500]
    """
    power = 10 ** math.floor(math.log10(max(1.0, count)))
    return int(next(m for m in (5, 2, 1) if m * power <= max(1.0, count)) * power)


def _in_python(change: str) -> str:
    """Return a changed setting as an argument in Python.

    >>> _in_python("queue_depth=2"), _in_python("gradient_link=e4m3")
    ('queue_depth=2', 'gradient_link="e4m3"')
    """
    name, _, value = change.partition("=")
    is_word = value.isidentifier() and value not in ("True", "False")
    return f'{name}="{value}"' if is_word else change


def what_to_run(plan: Plan, wishes: Wishes) -> Iterator[str]:
    """Yield the lines to run, the command of one device last."""
    chosen = plan.shown
    if chosen is not None and chosen.need.num_devices > 1:
        config = chosen.strategy.config
        knobs = "".join(f", {_in_python(change)}" for change in chosen.changes if "=" in change)
        work = chosen.need.workload
        count = f"{work.accumulation} micro-batch" + "es" * (work.accumulation > 1)
        loss = ", and a loss in chunks (Liger-Kernel has one)" if work.loss == "chunks" else ""
        yield (
            f"Predicted, not measured. On {chosen.need.num_devices} devices, in your own loop "
            f"{_WRAPPERS[plan.parallel]}, {count} of "
            f"{work.batch_size} on each{loss}:"
        )
        assert config is not None
        rate = written(FINE_TUNING["lr"])
        releases, is_whole = chosen.strategy.releases, plan.parallel == "ddp"
        mode = 'offload_gradients="release", ' if releases else ""
        group = "process_group=model.process_group, " if is_whole else ""
        yield (
            f"    optimizer = ZenFlowAdamW(model.parameters(), lr={rate}, {mode}{group}"
            f'config=ZenFlowConfig.preset("{chosen.strategy.name}"{knobs}))'
        )
        if releases and is_whole:
            yield "    optimizer.release_from(model)"
    command = run_command(plan, wishes)
    if command is None:
        recomputes = None if chosen is None else chosen.need.workload.checkpointing
        if not isinstance(recomputes, bool | None):
            yield (
                "Predicted, not measured. Our commands recompute all layers or none: "
                f"recompute so ({recomputes}) in your own loop."
            )
        return
    where = (
        "On one device" if plan.hardware.total_devices > 1 else "Predicted, not measured. Run it"
    )
    where += "" if plan.recommended else ", and watch its memory"
    put = "" if wishes.data else f" (your data in place of {_data_in(command)})"
    if chosen is not None and chosen.strategy.state_on_drive:
        put += f", in a folder of yours in place of {STATE_DIR}"
    yield f"{where}{put}:"
    yield f"    {command}"
