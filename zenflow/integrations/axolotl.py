"""ZenFlowAdamW in axolotl, as a plug-in that a YAML file names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from zenflow.config import ZenFlowConfig
from zenflow.errors import raise_violations, unknown_name
from zenflow.integrations.transformers import ZenFlowTrainerMixin

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, field_validator
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "zenflow.integrations.axolotl is for axolotl's own environment: install this package there"
    ) from error

_PRESET, _CONFIG = "preset", "zenflow"
_GROUPS = ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups")
"""axolotl's arguments that give some parameters a learning rate of their own."""
_RULE = tuple(field.name for field in fields(ZenFlowConfig))
_TRAINER = tuple(
    name
    for name, parameter in inspect.signature(ZenFlowTrainerMixin.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != _CONFIG
)


class ZenFlowArgs(BaseModel):
    """The key that the plug-in adds to axolotl's YAML file."""

    zenflow: dict[str, Any] | None = None
    """Settings of the update rule by their names, `preset`, and the mixin's own arguments."""

    @field_validator("zenflow")
    @classmethod
    def _check(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        _arguments_of(value)
        return value


class ZenFlowPlugin(BasePlugin):  # type: ignore[misc]
    """Trains axolotl's causal language models, full-parameter, with `ZenFlowAdamW`.

        plugins:
          - zenflow.integrations.axolotl.ZenFlowPlugin
        zenflow:
          topk_ratio: 0.1
          update_interval: 4

    `optimizer`, learning rate and schedule, betas, weight decay, `max_grad_norm` and
    `gradient_accumulation_steps` are axolotl's own keys. `optimizer` has to be one of torch's
    AdamW, which is axolotl's default.
    """

    def get_input_args(self) -> str:
        """Return the place of the class that describes the YAML file's further key."""
        return f"{__name__}.{ZenFlowArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Refuse what the mode lacks, and keep streamed weights off the device.

        Raises:
            ConfigError: The file asks for a kind of training that has another trainer.
        """
        raise_violations(
            "zenflow in axolotl",
            [
                f"{key}: {cfg.get(key)!r} has a trainer of its own: leave it out, or leave the "
                "plug-in out"
                for key in ("rl", "reward_model", "process_reward_model", "trainer_cls")
                if cfg.get(key)
            ],
        )
        if _arguments_of(cfg.get(_CONFIG)).get("stream", False) is not False:
            cfg["device_map"] = {"": "cpu"}

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return axolotl's trainer with the mixin and the YAML file's arguments."""
        from axolotl.core.trainers import AxolotlTrainer

        given = _arguments_of(cfg.get(_CONFIG))

        class Grouping(AxolotlTrainer):  # type: ignore[misc]
            """Groups parameters as for torch's AdamW; axolotl does not for a class it is given."""

            def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
                if any(getattr(self.args, key, None) is not None for key in _GROUPS):
                    return super().create_optimizer(*args, **kwargs)
                return Trainer.create_optimizer(self, *args, **kwargs)

        class ZenFlowAxolotlTrainer(ZenFlowTrainerMixin, Grouping):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **given, **kwargs)

        return ZenFlowAxolotlTrainer


def _arguments_of(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the mixin's arguments that the YAML file's mapping stands for.

    Raises:
        ConfigError: A key is unknown, or a rule of the settings is broken.
    """
    given = {key: _plain(value) for key, value in (mapping or {}).items()}
    known = (_PRESET, *_RULE, *_TRAINER)
    raise_violations(
        f"{_CONFIG}: in the YAML file",
        [f"key {unknown_name(key, known)}" for key in given if key not in known],
    )
    trainer = {name: given.pop(name) for name in _TRAINER if name in given}
    return {_CONFIG: ZenFlowConfig.preset(given.pop(_PRESET, "zenflow"), **given), **trainer}


def _plain(value: Any) -> Any:
    """Return a mapping of axolotl's own kind as a dict: an absent key of it would be None."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
