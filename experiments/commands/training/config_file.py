"""``--config FILE``: TOML or JSON of our own, or a DeepSpeed JSON.

Our own files hold the flags' names with underscores (``lr``, ``batch_size``, ``link_gbps``) and a
table ``zenflow`` with fields of ``ZenFlowConfig``. A field that a controller may choose can be
"auto" there, as in DeepSpeed's. Tables ``schedule_params`` and ``grad_scaler`` are what no flag
says, and ``tuned_for`` says what `zenflow tune` has found the settings for.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.training.parts.ranks.launched import Launched
from experiments.training.settings.field import settings_of, written_settings
from experiments.training.settings.schedule import params_of
from experiments.training.settings.training import TrainSettings
from experiments.training.settings.tuning import CHOSEN_KNOBS
from zenflow.config import PRESETS, ZenFlowConfig, raise_violations, unknown_name
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from zenflow.deepspeed.settings import DeepSpeedSettings

_TABLES = ("schedule_params", "grad_scaler")
_KEYS = {item.key: item for item in written_settings(TrainSettings)}
_KEYS |= {name: settings_of(TrainSettings)[name] for name in _TABLES}
_FILE_NAMES = (*_KEYS, "zenflow", "tuned_for")
_OF_DEEPSPEED = tuple(name for name in PRESETS if name != "delayed")  # no file asks for that
_DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""Top-level keys of which a DeepSpeed JSON has one at least, and no file of ours."""
_DEEPSPEED_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def read_config_file(
    path: Path, num_gpus: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's settings and its knobs of the update rule.

    ``with_flags`` and ``settle_auto`` come next.

    Args:
        path: The file.
        num_gpus: Number of GPUs that a DeepSpeed JSON is for; None is as many as train here.

    Raises:
        ConfigError: The file can't be read, or has a key that is nothing; the nearest is named.
    """
    content = _parse(path)
    if _DEEPSPEED_KEYS & content.keys():
        return _from_deepspeed(path, num_gpus)
    knobs = content.get("zenflow", {})
    if not isinstance(knobs, Mapping):
        raise ConfigError(f"'zenflow' in {path} must be a table of knobs, but is {knobs!r}")
    unknown = [
        f"key {unknown_name(key, _FILE_NAMES)}" for key in content if key not in _FILE_NAMES
    ]
    raise_violations(str(path), unknown)
    read = {item.name: item.read(content[key]) for key, item in _KEYS.items() if key in content}
    raise_violations(str(path), [wrong for _, wrong in read.values() if wrong is not None])
    settings = {name: value for name, (value, _) in read.items()}
    return settings, dict(knobs)


def tuned_for(path: Path) -> str | None:
    """Return the model and machine that a file's knobs were found for; None if unknown."""
    about = _parse(path).get("tuned_for")
    if not isinstance(about, Mapping):
        return None
    names = {"model": "of {}", "machine": "on {}", "figures": "({} figures)"}
    words = [form.format(about[name]) for name, form in names.items() if name in about]
    return f"Knobs of {path} were tuned for a run {' '.join(words)}"


def with_flags(from_file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings with flags in place of what they contradict."""
    made = dict(from_file)
    if {"steps", "epochs"} & flags.keys():
        made = {name: value for name, value in made.items() if name not in ("steps", "epochs")}
    if "schedule" in flags:
        made.pop("schedule_params", None)
    elif "warmup" in flags and "schedule_params" in made:
        made["schedule_params"] = {
            name: value
            for name, value in made["schedule_params"].items()
            if name != "warmup_num_steps"
        }
    return {**made, **flags}


def said_of_rates(path: Path, settings: Mapping[str, Any], flags: Collection[str]) -> str | None:
    """Return a sentence on a DeepSpeed JSON's learning rate; None for a file of our own.

    Args:
        path: The file.
        settings: Settings that the file stands for.
        flags: Names of the settings that flags give.
    """
    if not _DEEPSPEED_KEYS & _parse(path).keys() or {"schedule", "warmup"} & set(flags):
        return None
    if settings["schedule"] == "constant":
        return (
            f"{path} has no scheduler, so the learning rate is constant, as it is in DeepSpeed; "
            "--schedule and --warmup ask for another"
        )
    params = ", ".join(f"{name} {value}" for name, value in settings["schedule_params"].items())
    return f"The learning rate is that of DeepSpeed's {settings['schedule']} ({params})"


def settle_auto(
    settings: Mapping[str, Any], knobs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings and knobs without any "auto": who chooses is said by ``controller``.

    A window length of "auto" is zen-auto's, the published rule, unless another controller is asked
    for. Selections of "auto" are the twin's where it runs, and one an epoch elsewhere.

    Raises:
        ConfigError: A knob is "auto" and no controller that is asked for chooses it.
    """
    made = dict(settings)
    auto = [name for name, value in knobs.items() if value == "auto"]
    if "update_interval" in auto and made.get("controller") is None:
        made["controller"] = "zen-auto"
    chosen = CHOSEN_KNOBS.get(str(made.get("controller")), ())
    kept = {name: value for name, value in knobs.items() if value != "auto"}
    left = [name for name in auto if name not in chosen]
    if "select_strategy" in left:
        kept["select_strategy"] = "step" if "select_interval" in kept else "epoch"
    if "select_interval" in left:
        kept["select_interval"] = 1
        kept["select_strategy"] = "epoch"
    raise_violations(
        "the run",
        [
            f"{name} is 'auto', but nobody chooses it: give it a value, or the run --auto"
            for name in left
            if not name.startswith("select_")
        ],
    )
    return made, kept


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = _json(text) if path.suffix.lower() == ".json" else _toml(path, text)
    except OSError as error:
        raise ConfigError(
            f"--config {path} can't be read ({error.strerror}): check the path"
        ) from error
    except (ValueError, RecursionError) as error:  # a parser's ValueError has a line number
        kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise ConfigError(f"--config {path} is not valid {kind}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold a table of settings, but holds {content!r}")
    return content


def _json(text: str) -> Any:
    from zenflow.deepspeed.file import without_comments

    return json.loads(without_comments(text))  # which a DeepSpeed JSON may have


def _toml(path: Path, text: str) -> dict[str, Any]:
    # By name: each Python has one of the two, and a type checker sees one Python.
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        parser = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--config {path}: Python 3.10 reads TOML with tomli (pip install tomli); or write "
            "the same settings as JSON"
        ) from error
    parsed: dict[str, Any] = parser.loads(text)
    return parsed


def _from_deepspeed(path: Path, num_gpus: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    # Imported late: only this branch needs it.
    from zenflow.deepspeed.read import read_deepspeed

    # Epochs are counted in steps once the data is known; until then any number is as good.
    found = read_deepspeed(path, steps_per_epoch=1)
    strategy, knobs = nearest_preset(found)
    knobs |= dict.fromkeys(found.auto_knobs, "auto")
    settings: dict[str, Any] = {"strategy": strategy, **found.optimizer}
    if found.schedule is None:
        settings |= {"schedule": "constant", "warmup": 0.0}
    else:
        settings |= {"schedule": found.schedule.kind, "schedule_params": params_of(found.schedule)}
        settings |= _known(lr=found.schedule.max_lr, steps=found.schedule.total_steps)
    if "gradient_clipping" not in found.auto:
        settings["max_grad_norm"] = found.max_grad_norm
    ranks = Launched.here().count
    try:
        batch, accumulation = found.batch_on(num_gpus or ranks)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    settings |= _known(
        grad_accum=accumulation,
        batch_size=None if batch is None else batch * ranks,  # ours is that of all ranks
        dtype=_DEEPSPEED_DTYPES.get(found.dtype or ""),
    )
    if found.dtype == "fp16":
        settings |= {"gradients": "keep", "grad_scaler": dict(found.grad_scaler or {})}
    return settings, knobs


def _known(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def nearest_preset(found: DeepSpeedSettings) -> tuple[str, dict[str, Any]]:
    """Return the preset that differs from a DeepSpeed rule in the fewest fields, and those."""
    # Only the published rule leaves knobs to a controller, and S = 1 is just where it starts.
    names = ("zenflow_paper",) if found.auto_knobs else _OF_DEEPSPEED
    values = found.config.to_dict()
    if values["select_strategy"] == "epoch":
        values["steps_per_epoch"] = None
    differences = {}
    for name in names:
        base = ZenFlowConfig.preset(name).to_dict()
        differences[name] = {key: item for key, item in values.items() if item != base[key]}
    nearest = min(differences, key=lambda name: len(differences[name]))
    return nearest, differences[nearest]
