"""ZenFlowAdamW in the Trainer of transformers, and in trainers made of it, such as TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from zenflow.config import ZenFlowConfig
from zenflow.integrations.accelerate import follow_backward, route_clipping, unwrapped
from zenflow.integrations.step_log import StepLog
from zenflow.optimizer import ZenFlowAdamW
from zenflow.streaming.page import page_of
from zenflow.streaming.stream import WeightStream
from zenflow.surface.stream_weights import stream_weights

try:
    from transformers import DefaultFlowCallback, Trainer, TrainerCallback

    from zenflow.integrations.tuned import TunedCourse, tuned_rules
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'zenflow.integrations.transformers needs transformers: pip install "zenflow-offload[hf]"'
    ) from error

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed

    from autotune.online.tuning import Tuning
else:
    _Mixed = object


class ZenFlowCallback(TrainerCallback):
    """Logs the optimizer's steps, and lets a Trainer save and keep true weights.

    A `ZenFlowTrainer` has one. With another Trainer and a `ZenFlowAdamW` of your own:

        trainer.add_callback(ZenFlowCallback(trainer))

    - Each row of the Trainer's log has `StepLog.take`'s values under `zenflow/`, so that they come
      to whatever `report_to` names.
    - When the Trainer is about to save a checkpoint, the model has the true weights. Saves that
      another callback asks for at the end of a step are not seen; `ZenFlowTrainer` sees those too.
    - After training the model has the true weights. If the best model was loaded, they are its.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Make the callback of one trainer, to which it has yet to be added."""
        # Not the trainer itself: its optimizer would live until a garbage collection.
        self._callbacks = trainer.callback_handler.callbacks
        self._log = StepLog()

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Move behind the callback that decides about saves, and before those that report.

        Raises:
            ValueError: The trainer has another optimizer.
        """
        if unwrapped(optimizer) is None:
            raise ValueError(
                "ZenFlowCallback is for ZenFlowAdamW, and this trainer has another optimizer: use "
                "ZenFlowTrainer, or optimizer_cls_and_kwargs=(ZenFlowAdamW, {...})"
            )
        self._callbacks.remove(self)
        deciding = [isinstance(callback, DefaultFlowCallback) for callback in self._callbacks]
        self._callbacks.insert(deciding.index(True) + 1 if any(deciding) else 0, self)

    def on_epoch_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Count micro-batches anew: a stream of unknown length may have ended in mid-step."""
        _zenflow(optimizer).restart_accumulation()

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Take the step's report; show the true weights if a save follows."""
        own = _zenflow(optimizer)
        self._log.add(own.report)
        if control.should_save:
            own.eval()  # the Trainer calls train() before the next forward

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add a row's values to a row about training."""
        if logs is not None and "loss" in logs:
            row = self._log.take()
            logs.update(row)
            state.log_history[-1].update(row)

    def on_epoch_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Show the true weights: a save may follow, or the best model be loaded."""
        _zenflow(optimizer).eval()

    def on_train_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Leave the true weights in the model, which are the best model's if that was loaded."""
        own = _zenflow(optimizer)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            own.adopt_weights()
        own.eval()


def _zenflow(optimizer: Any) -> ZenFlowAdamW:
    own = unwrapped(optimizer)
    assert own is not None  # looked at when training began
    return own


class ZenFlowTrainerMixin(_Mixed):
    """Gives a Trainer of any kind `ZenFlowAdamW`, made from its arguments.

    Name it first:

        class ZenFlowSFTTrainer(ZenFlowTrainerMixin, SFTTrainer): ...

    AdamW's settings in the TrainingArguments hold: learning rate and its schedule, betas, eps,
    weight decay and the parameters without it, `max_grad_norm`, `gradient_accumulation_steps`.
    The optimizer is made when training begins, of the parameters that PEFT leaves trainable. The
    model is evaluated and saved with its true weights, and has them after `train()`.
    """

    zenflow_optimizer: ZenFlowAdamW | None = None
    """The optimizer, with `report`, `memory` and `close()`; None before `train()`."""
    weight_stream: WeightStream | None = None
    """Stream of the layers' weights; None where all stay on the device."""
    _course: TunedCourse | None = None

    def __init__(
        self,
        *args: Any,
        zenflow: ZenFlowConfig | None = None,
        release: bool = True,
        stream: bool | Mapping[str, Any] = False,
        state_dir: str | PathLike[str] | None = None,
        auto: bool | Mapping[str, Any] = False,
        optimizer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the trainer, and a `ZenFlowCallback` of it.

        Args:
            *args: The trainer's own arguments.
            zenflow: Settings of the update rule; None for the preset "zenflow".
            release: Whether gradients leave during backward. Several ranks and fp16 need False.
            stream: Whether the layers' weights live on the host and visit the device, for a model
                that does not fit it; or the arguments of `stream_weights`, such as
                `{"resident_layers": 8}`.
            state_dir: Folder on a local drive for the host's states, with a `topk_ratio` of 0;
                None keeps them in memory.
            auto: Whether k, S and `select_interval` are chosen while the run goes on; or options
                of `autotune.online.tuner.Tuner` by name, such as `{"largest_staleness": 8}`, or
                `{"replay": "out/decisions.jsonl"}`, which repeats a tuned run.
            optimizer_options: Further arguments of `ZenFlowAdamW`, such as `controller`.
            **kwargs: The trainer's own arguments; no optimizer.

        Raises:
            ValueError: The arguments ask for another optimizer, or for what the mode lacks.
        """
        self._streams = stream is not False
        if self._streams and not release:  # before any weight has moved
            raise ValueError(
                "stream needs gradients that leave in backward: leave release=False out"
            )
        if self._streams and auto is not False:
            raise ValueError(
                "stream has no tuner yet, whose simulator knows no visiting weights: leave it out"
            )
        self._stream_options = dict(stream) if isinstance(stream, Mapping) else {}
        super().__init__(*args, **kwargs)
        if self._streams and self.weight_stream is None and self.model is not None:
            self._move_model_to_device(self.model, self.args.device)
        self._zenflow = zenflow
        self._releases = release
        self._optimizer_options = {"state_dir": state_dir, **(optimizer_options or {})}
        if auto is not False:
            self._course = TunedCourse(self, auto if isinstance(auto, Mapping) else {})
        _check_trainer(self, release=release, streams=self._streams)
        self.add_callback(ZenFlowCallback(self))
        if self._course is not None:
            self.add_callback(self._course)

    @property
    def tuning(self) -> Tuning | None:
        """Controller and decisions of a tuned run; None before `train()`, and of any other."""
        return None if self._course is None else self._course.tuning

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as `Trainer.train` does. A tuned trainer trains once."""
        with (
            nullcontext()
            if self._course is None
            else self._course.training(resume_from_checkpoint)
        ):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; in training the timeline has it as a span, as it has backward."""
        optimizer = self.zenflow_optimizer if model.training else None
        with nullcontext() if optimizer is None else optimizer.span("forward"):
            return super().compute_loss(model, *args, **kwargs)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Move a model to the device, or let its layers visit it."""
        if not self._streams:
            super()._move_model_to_device(model, device)
        elif not any(page_of(param) for param in model.parameters()):
            self.weight_stream = stream_weights(model, device, **self._stream_options)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the optimizer, if there is none, and let it clip."""
        if self.optimizer is None:
            if self.zenflow_optimizer is not None:  # of another model: its memory is needed now
                self.zenflow_optimizer.close()
            self.optimizer_cls_and_kwargs = (ZenFlowAdamW, self._optimizer_arguments())
        super().create_optimizer(*args, **kwargs)
        self.zenflow_optimizer = _zenflow(self.optimizer)
        self.zenflow_optimizer.zero_grad()  # a run before may have been broken off in backward
        route_clipping(self.accelerator, self.zenflow_optimizer)
        follow_backward(self.accelerator, self.zenflow_optimizer, always=True)
        return self.zenflow_optimizer

    def _optimizer_arguments(self) -> dict[str, Any]:
        _, adamw = _asked_for(self)
        mode: dict[str, Any] = {"offload_gradients": "keep"}  # the accelerator's call clips
        if self._releases:
            mode = {
                "offload_gradients": "release",
                "max_grad_norm": self.args.max_grad_norm or None,
                "accumulation_steps": self.args.gradient_accumulation_steps,
            }
        options = {**adamw, **mode, "config": self._zenflow, **self._optimizer_options}
        return options if self._course is None else options | self._course.begin(options)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the true weights, as `Trainer.save_model` saves the model's."""
        optimizer = self.zenflow_optimizer
        with nullcontext() if optimizer is None else optimizer.true_weights():
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Save the optimizer's state in the compact form."""
        optimizer = self.zenflow_optimizer
        with nullcontext() if optimizer is None else optimizer.compact_states():
            super()._save_optimizer_and_scheduler(*args, **kwargs)
        if self._course is not None:
            self._course.save(optimizer, *args, **kwargs)


class ZenFlowTrainer(ZenFlowTrainerMixin, Trainer):
    """The Trainer of transformers with `ZenFlowAdamW`, in release mode unless told otherwise.

    trainer = ZenFlowTrainer(model=model, args=args, train_dataset=texts)
    trainer.train()
    """


def _asked_for(trainer: Trainer) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer's class and settings that the TrainingArguments ask for."""
    model: Any = trainer.model
    return trainer.get_optimizer_cls_and_kwargs(trainer.args, model)


def _check_trainer(trainer: ZenFlowTrainerMixin, *, release: bool, streams: bool) -> None:
    """Refuse settings that this optimizer can't have, before any work.

    Raises:
        ValueError: A rule is broken; the message lists all that are.
    """
    args = trainer.args
    optimizer_class, _ = _asked_for(trainer)
    rules = [
        (
            trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None,
            "optimizers= and optimizer_cls_and_kwargs= must be left out: the optimizer is made "
            "from args; for one of your own use Trainer with ZenFlowCallback",
        ),
        (
            optimizer_class is torch.optim.AdamW,
            f"optim={str(args.optim)!r} is not AdamW: leave it out",
        ),
        (
            not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled),
            "deepspeed= and fsdp= must be left out: this optimizer offloads by itself",
        ),
        (
            not release or args.world_size == 1,
            f"release mode is for one rank, and there are {args.world_size}: set release=False",
        ),
        (
            not streams or args.n_gpu <= 1,
            f"stream is for one GPU, and the Trainer sees {args.n_gpu}: hide the others with "
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            not (release and args.fp16),
            "release mode can't unscale gradients: use bf16=True, or set release=False",
        ),
        (
            not (release and getattr(args, "enable_jit_checkpoint", False)),
            "enable_jit_checkpoint saves between backward and step, when gradients have left: "
            "use save_steps, or set release=False",
        ),
    ]
    if trainer._course is not None:
        rules += tuned_rules(trainer, trainer._optimizer_options)
    broken = [text for holds, text in rules if not holds]
    if broken:
        raise ValueError("; ".join(broken))
