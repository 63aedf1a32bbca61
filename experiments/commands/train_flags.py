"""The flags of ``zenflow train``, and from flags and files to settings. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from experiments.training.settings import (
    DTYPES,
    GRADIENT_MODES,
    MODEL_SIZES,
    SCHEDULES,
    TASKS,
    TrainSettings,
)
from experiments.training.tuning_rules import CONTROLLERS
from zenflow.config import PRESETS
from zenflow.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
_GIGA = 1e9


class LinkRates(click.ParamType):
    """``D2H,H2D`` in GB/s; one number stands for both."""

    name = "D2H,H2D"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, float]:
        """Return bytes/s each way."""
        if isinstance(value, tuple):
            return value
        try:
            rates = [float(part) for part in str(value).split(",")]
        except ValueError:
            rates = []
        if len(rates) not in (1, 2) or not all(math.isfinite(r) and r > 0 for r in rates):
            self.fail(
                f"the link's rates are two positive numbers of GB/s, as in 0.05,0.05, but got "
                f"{value!r}", param, ctx,
            )  # fmt: skip
        return rates[0] * _GIGA, rates[-1] * _GIGA


class NumberOr(click.ParamType):
    """A number, or a word that stands for None."""

    def __init__(self, kind: type[int] | type[float], word: str) -> None:
        """Take ``kind`` and the ``word``."""
        self._kind = kind
        self._word = word
        self.name = f"{kind.__name__.upper()}|{word}"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number, or None for the word."""
        if value == self._word:
            return None
        try:
            return self._kind(value)
        except (TypeError, ValueError):
            self.fail(f"must be a number or {self._word!r}, but is {value!r}", param, ctx)


class Gigabytes(click.ParamType):
    """GB, as bytes."""

    name = "GB"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return bytes."""
        try:
            return float(value) * _GIGA
        except ValueError:
            self.fail(f"must be a number of GB, as in 24 or 0.5, but is {value!r}", param, ctx)


def _choice(values: Any) -> click.Choice[str]:
    return click.Choice(list(values))


_sizes = ", ".join(MODEL_SIZES)
_RUN_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--strategy", {"type": _choice(PRESETS), "help": "Preset that the knobs start from."}),
    (
        "--model",
        {"help": f"A size ({_sizes}), a config.json, a local directory or a hub name."},
    ),
    (
        "--data",
        {
            "help": "Text file, TSV of text and label, directory, or Hugging Face data set "
            "(name or name:config); default: the source of this Python's standard library."
        },
    ),
    (
        "--eval-data",
        {"help": "File or directory to evaluate on; default: a part of --data is held out."},
    ),
    ("--task", {"type": _choice(TASKS), "help": "auto goes by the data."}),
    ("--text-column", {"help": "Column of a data set that holds the text."}),
    ("--label-column", {"help": "Column of a data set that holds the class."}),
    ("--sequence", {"type": int, "help": "Tokens of a sequence."}),
    ("--batch-size", {"type": int, "help": "Sequences of a micro-batch."}),
    ("--grad-accum", {"type": int, "help": "Micro-batches of a step."}),
    ("--steps", {"type": int, "help": "Optimizer steps."}),
    ("--epochs", {"type": float, "help": "Passes over the data, in place of --steps."}),
    ("--lr", {"type": float, "help": "Peak learning rate."}),
    ("--betas", {"type": (float, float), "help": "AdamW's two decay rates."}),
    ("--eps", {"type": float, "help": "AdamW's epsilon."}),
    ("--weight-decay", {"type": float, "help": "Decoupled decay of matrices."}),
    ("--schedule", {"type": _choice(SCHEDULES), "help": "Learning rate after the rise."}),
    ("--warmup", {"type": float, "help": "Share of the steps over which it rises."}),
    (
        "--max-grad-norm",
        {"type": NumberOr(float, "none"), "help": "Global-norm clip, or none."},
    ),
    (
        "--gradients",
        {"type": _choice(GRADIENT_MODES), "help": "When gradients leave: in backward, or step()."},
    ),
    ("--dtype", {"type": _choice(DTYPES), "help": "The parameters' precision."}),
    (
        "--checkpointing/--no-checkpointing",
        {"help": "Recompute each layer's activations in backward."},
    ),
    ("--device", {"help": "auto, cpu or cuda."}),
    (
        "--link-gbps",
        {"type": LinkRates(), "help": "Emulated link of a CPU in GB/s, as in 0.05,0.05."},
    ),
    ("--host-threads", {"type": int, "help": "Threads of the host update."}),
    ("--device-threads", {"type": int, "help": "Threads of torch."}),
    ("--seed", {"type": int, "help": "Decides the first weights and the data's order."}),
    (
        "--start-steps",
        {"type": int, "help": "Steps on the device that --compare goes on from; 0: none."},
    ),
    ("--save-every", {"type": int, "help": "Steps between checkpoints; 0: by minutes only."}),
    (
        "--save-minutes",
        {
            "type": float,
            "help": "Minutes between checkpoints, or more; 0: by steps only.",
        },
    ),
    ("--eval-every", {"type": int, "help": "Steps between evaluations; 0: at the end only."}),
    ("--eval-batches", {"type": int, "help": "Held-out batches of an evaluation, at most."}),
    ("--timeline-steps", {"type": int, "help": "Last steps whose spans are recorded."}),
)
_KNOB_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--topk-ratio", {"type": float, "help": "Share of columns the device updates."}),
    ("--select-strategy", {"type": _choice(("step", "epoch")), "help": "Unit of the next one."}),
    ("--select-interval", {"type": int, "help": "Between two selections; 0: only the first."}),
    ("--update-interval", {"type": int, "help": "Steps of a window, S."}),
    ("--overlap-step/--no-overlap-step", {"help": "Host updates behind following steps."}),
    ("--lag", {"type": NumberOr(int, "S"), "help": "Steps until an update lands, or S."}),
    ("--rolling/--aligned", {"help": "Windows end in turn, or together."}),
    (
        "--deferred-moments",
        {"type": _choice(("step", "window")), "help": "What the host's moments see."},
    ),
    (
        "--deferred-lr-scale",
        {"type": _choice(("none", "sqrt", "linear")), "help": "Host rate for a window."},
    ),
    ("--prediction", {"type": float, "help": "Gamma of the uploaded weights."}),
    ("--full-warm-up-rounds", {"type": int, "help": "First steps that defer nothing."}),
    ("--importance-decay", {"type": float, "help": "Memory of the columns' scores."}),
    ("--hysteresis", {"type": float, "help": "Lead that a column needs to be selected."}),
    ("--min-split-elements", {"type": int, "help": "Smaller parameters stay on the device."}),
    ("--block-elements", {"type": int, "help": "Most elements in a block."}),
)
_TUNING_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--controller",
        {
            "type": _choice(CONTROLLERS),
            "help": "Who chooses knobs while the run goes on: the simulator's twin of the run, "
            "zen-auto (S alone), or both.",
        },
    ),
    ("--device-memory", {"type": Gigabytes(), "help": "Most GB of one device, with --auto."}),
    ("--host-memory", {"type": Gigabytes(), "help": "Most GB of the host, with --auto."}),
    (
        "--largest-staleness",
        {"type": int, "help": "Most steps from a gradient to its landing, with --auto."},
    ),
    (
        "--smallest-captured",
        {"type": float, "help": "Least share of energy in important columns, with --auto."},
    ),
    ("--profile", {"help": "File of zenflow calibrate that --auto starts from."}),
    ("--hardware", {"help": "Machine of the simulator's table that --auto starts from."}),
)


def _name(flag: str) -> str:
    return flag.split("/", maxsplit=1)[0].removeprefix("--").replace("-", "_")


SETTING_NAMES = tuple("link" if flag == "--link-gbps" else _name(flag) for flag, _ in _RUN_FLAGS)
KNOB_NAMES = tuple(_name(flag) for flag, _ in _KNOB_FLAGS)
KNOB_TYPES = {_name(flag): options.get("type", bool) for flag, options in _KNOB_FLAGS}
"""Click's type of each knob."""
TUNING_NAMES = tuple(_name(flag) for flag, _ in _TUNING_FLAGS)


def train_flags(command: Command) -> Command:
    """Give a command every flag of a run and of the update rule, in this file's order."""
    defaults = TrainSettings()
    for flag, options in reversed(_RUN_FLAGS + _KNOB_FLAGS):
        extra = {}
        default = getattr(defaults, _name(flag), None)
        if default not in (None, False):
            extra["help"] = f"{options['help']}  [default: {_shown(default)}]"
        command = click.option(flag, default=None, **{**options, **extra})(command)
    return command


def tuning_flags(command: Command) -> Command:
    """Give a command the flags of a run that chooses its own knobs, ``--auto`` first."""
    for flag, options in reversed(_TUNING_FLAGS):
        command = click.option(flag, default=None, **options)(command)
    return click.option(
        "--auto",
        is_flag=True,
        help="Choose k, S, lag, windows and selections while the run goes on: --controller both.",
    )(command)


def knob_flags(command: Command) -> Command:
    """Give a command the flags of the update rule alone."""
    for flag, options in reversed(_KNOB_FLAGS):
        command = click.option(flag, default=None, **options)(command)
    return command


def given_flags(context: click.Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the knobs that stand on the command line, and no others."""
    given = _given(context)
    if "link_gbps" in given:
        given["link"] = given.pop("link_gbps")
    settings = {name: value for name, value in given.items() if name in SETTING_NAMES}
    return settings, {name: value for name, value in given.items() if name in KNOB_NAMES}


def given_tuning(context: click.Context) -> dict[str, Any]:
    """Return the settings of a tuned run that stand on the command line, and no others.

    Raises:
        ConfigError: Two flags name different controllers.
    """
    given = _given(context)
    found = {name: value for name, value in given.items() if name in TUNING_NAMES}
    if given.get("auto") and found.setdefault("controller", "both") != "both":
        raise ConfigError(
            f"--auto is --controller both, but --controller {found['controller']} is given: "
            "leave one of the two out"
        )
    return found


def _given(context: click.Context) -> dict[str, Any]:
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
