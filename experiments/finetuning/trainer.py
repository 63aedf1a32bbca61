"""TRL's SFTTrainer with our optimizer, made from a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import SFTConfig, SFTTrainer

from experiments.finetuning.card import CARD, card
from experiments.finetuning.course import evaluations
from experiments.finetuning.settings import FineTuning
from experiments.finetuning.template import Templated
from experiments.finetuning.tuned import trainer_options
from experiments.training.parts.models.named import find_model, has_weights
from experiments.training.run.saved.pace import COMPACT_STEPS, SavePace
from zenflow.errors import ConfigError, NoRoomError
from zenflow.integrations.transformers import ZenFlowTrainerMixin

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
_LEFT_OUT = (ProgressCallback, PrinterCallback)
_auto: Any = transformers  # whose classes by name have no types


class ZenFlowSFTTrainer(ZenFlowTrainerMixin, SFTTrainer):  # type: ignore[misc] # is untyped here
    """SFTTrainer whose optimizer has its state on the host."""

    settings: FineTuning
    """Settings of the run, for the model's card."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write the model's card; TRL does so at each save, under a name of its own."""
        folder, evaluated = Path(str(self.args.output_dir)), evaluations(self.state)
        loss = evaluated[-1]["eval_loss"] if evaluated else None
        text = card(self.settings, folder, self.state.global_step, loss)
        (folder / CARD).write_text(text, encoding="utf-8")


def load_tokenizer(name: str) -> Any:
    """Return a model's tokenizer.

    Raises:
        ConfigError: It can't be loaded.
    """
    try:
        return _auto.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(name, "tokenizer", error) from error


def shape_of(settings: FineTuning) -> Any:
    """Return a model without memory for its weights: their shapes and dtypes alone.

    Raises:
        ConfigError: There is no such language model, or its weights are not there, quantized, or
            an adapter's.
    """
    name = settings.run.model
    if (Path(name) / "adapter_config.json").is_file():
        raise ConfigError(
            f"--model {name} is an adapter of PEFT: merge it first (merge_and_unload), and give "
            "the merged model"
        )
    found = find_model(name)
    try:
        config = _auto.AutoConfig.from_pretrained(name)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                f"the weights of --model {name} are quantized, and all of them are trained here: "
                "give the model they were made from"
            )
        if not has_weights(found):
            raise ConfigError(
                f"--model {name} has no weights to fine-tune: give a folder that has them, or "
                "train from random ones with zenflow train"
            )
        with torch.device("meta"):
            return _auto.AutoModelForCausalLM.from_config(
                config, dtype=_DTYPES[settings.run.dtype]
            )
    except ConfigError:  # which is a ValueError
        raise
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(name, "model", error) from error


def load_model(settings: FineTuning) -> Any:
    """Return the model with its weights, on the host.

    Raises:
        ConfigError: They can't be loaded.
    """
    name = settings.run.model
    try:
        return _auto.AutoModelForCausalLM.from_pretrained(name, dtype=_DTYPES[settings.run.dtype])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unloadable(name, "model", error) from error


def _unloadable(name: str, what: str, error: Exception) -> ConfigError:
    line = (str(error).strip().splitlines() or [repr(error)])[0]
    return ConfigError(
        f"the {what} of --model {name} can't be loaded by transformers "
        f"{transformers.__version__} ({line}): give a folder that save_pretrained wrote, a name "
        "on the hub that this machine can reach, or a newer transformers"
    )


def arguments(settings: FineTuning, data: Templated, out: Path, device: torch.device) -> SFTConfig:
    """Return TRL's configuration of a run.

    Args:
        settings: The run's.
        data: Its rows.
        out: Folder of checkpoints and of the model.
        device: Where the model computes.
    """
    run, own = settings.run, settings.own
    is_text, on_cpu = data.rows.form == "text", device.type == "cpu"
    evaluates = data.rows.held_out is not None
    best = own.wants_best and evaluates
    length = {"max_steps": run.steps} if run.steps else {"num_train_epochs": run.epochs}
    saves = _save_steps(settings)
    return SFTConfig(
        str(out.resolve()),  # the best checkpoint is found from any directory
        **length,
        **data.arguments,
        max_length=run.sequence,
        packing=is_text if own.packing is None else own.packing,
        packing_strategy="bfd_split" if is_text else "bfd",  # no text is cut off
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.batch_size,
        gradient_accumulation_steps=run.grad_accum,
        gradient_checkpointing=run.checkpointing,
        learning_rate=run.lr,
        adam_beta1=run.betas[0],
        adam_beta2=run.betas[1],
        adam_epsilon=run.eps,
        weight_decay=run.weight_decay,
        max_grad_norm=run.max_grad_norm or 0.0,
        lr_scheduler_type=_SCHEDULES[run.schedule],
        warmup_steps=run.warmup,
        bf16=False,  # weights have their dtype, and are computed with in it
        seed=run.seed,
        eval_strategy="steps" if evaluates and run.eval_every else "no",
        eval_steps=run.eval_every or None,
        save_strategy="steps" if saves else "no",
        save_steps=saves or 1,
        save_total_limit=1,  # beside the best one
        load_best_model_at_end=best,
        metric_for_best_model="eval_loss" if best else None,
        greater_is_better=False if best else None,
        logging_steps=1,
        report_to=own.report_to.split(",") if own.report_to else [],
        include_num_input_tokens_seen="non_padding",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        disable_tqdm=True,
    )


def _save_steps(settings: FineTuning) -> int:
    """Return the steps between saves that the Trainer makes; 0: none."""
    run = settings.run
    if not run.checkpoint:
        return 0
    if settings.own.wants_best:
        return run.eval_every
    return run.save_every or (COMPACT_STEPS if run.is_compact else 0)


def make_trainer(
    settings: FineTuning,
    data: Templated,
    args: SFTConfig,
    model: Any,
    tokenizer: Any,
    streams: Mapping[str, Any] | None,
) -> Any:
    """Return the trainer, which has the rows' tokens.

    Args:
        settings: The run's.
        data: Its rows.
        args: TRL's configuration.
        model: The model, on the host.
        tokenizer: Its tokenizer.
        streams: Arguments of `stream_weights`; None where all weights go to the device.

    Raises:
        ConfigError: TRL or the mixin refuse a setting.
        NoRoomError: The host has too little memory.
    """
    run = settings.run
    options: dict[str, Any] = {"offload_sums": run.offload_sums, "drive_tbw": run.drive_tbw}
    if run.host_threads is not None:
        options["host_threads"] = run.host_threads
    try:
        trainer: Any = ZenFlowSFTTrainer(
            model=model,
            args=args,
            train_dataset=data.rows.train,
            eval_dataset=data.rows.held_out,
            processing_class=tokenizer,
            zenflow=settings.config,
            release=run.gradients == "release",
            stream=False if streams is None else streams,
            state_dir=run.state_dir,
            auto=trainer_options(settings, model.config.to_dict()),
            optimizer_options=options,
        )
    except MemoryError as error:
        raise NoRoomError(str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    trainer.settings = settings
    for callback in _LEFT_OUT:  # another shows the run
        trainer.remove_callback(callback)
    return trainer


def pace_of(settings: FineTuning) -> SavePace | None:
    """Return when a run is saved by the clock; None where it is not saved at all."""
    return SavePace.of(settings.run) if settings.run.checkpoint else None
