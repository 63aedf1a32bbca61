"""ZenFlowAdamW in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from zenflow.integrations.step_log import StepLog
from zenflow.optimizer import ZenFlowAdamW

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'zenflow.integrations.lightning needs Lightning: pip install "zenflow-offload[lightning]"'
    ) from error


class ZenFlowCallback(Callback):
    """Shows true weights where a Lightning run evaluates and saves, logs, and closes at the end.

        trainer = Trainer(callbacks=[ZenFlowCallback()])

    - Validation runs with the true weights, and every checkpoint has them, as has any other
      `state_dict()` of the module. Training goes back to its own, bit for bit.
    - After `fit` the module has the true weights, and the optimizer's threads have ended.
    - Averages that Lightning's callbacks keep are validated, saved, and left in the module in
      their place. Those of epochs are of true weights, those of steps of weights of training.
    - Every `log_every_n_steps` the loggers get `StepLog.take`'s values under `zenflow/`.

    In release mode the optimizer clips: `max_grad_norm` in place of the Trainer's
    `gradient_clip_val`. Its steps have as many backward passes as the Trainer's, whose number may
    change in mid-run, as `GradientAccumulationScheduler` changes it.
    """

    def __init__(self) -> None:
        """Make the callback of one trainer."""
        super().__init__()
        self._logs: list[StepLog] = []
        self._hook: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that trainer and optimizers go together, and take the first place.

        Later callbacks, such as averages, may then put weights in the place of the true ones.

        Raises:
            ValueError: Trainer and optimizers don't go together, or there is no `ZenFlowAdamW`.
        """
        optimizers = _optimizers(trainer)
        if not optimizers:
            raise ValueError(
                "ZenFlowCallback is for ZenFlowAdamW: return one from configure_optimizers()"
            )
        for optimizer in optimizers:
            if optimizer.releases_gradients:
                _check_release(trainer, pl_module, optimizer)
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # set elsewhere
        callbacks.remove(self)
        callbacks.insert(0, self)
        several = len(optimizers) > 1
        self._logs = [
            StepLog(f"zenflow/{index}/" if several else "zenflow/")
            for index in range(len(optimizers))
        ]

        def show_true(module: LightningModule, *_: Any) -> None:
            if module is pl_module:  # and not a copy of it, such as an average
                _show_true(trainer)

        register: Any = pl_module.register_state_dict_pre_hook
        self._hook = register(show_true)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go back to the weights of training, if the true ones are shown."""
        # An average that stays, and whose batch norms are run over the data without backward.
        is_average = getattr(trainer.fit_loop, "_skip_backward", False)
        for optimizer in _optimizers(trainer):
            if not is_average:
                optimizer.train()
            elif batch_idx == 0:
                optimizer.adopt_weights()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Tell the optimizer the number of passes left in its step: a callback may change it."""
        if pl_module.automatic_optimization:
            every = trainer.accumulate_grad_batches
            left = every - trainer.fit_loop.epoch_loop.batch_idx % every
            for optimizer in _optimizers(trainer):
                optimizer._source.expect_passes(left)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Take the step's report, and log where a row is due."""
        for log, optimizer in zip(self._logs, _optimizers(trainer), strict=True):
            log.add(optimizer.report)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # set elsewhere
        if not every or trainer.global_step == 0 or trainer.global_step % every:
            return
        for log in self._logs:
            row = log.take()
            for logger in trainer.loggers if row else ():
                logger.log_metrics(row, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the true weights, of which averages may be taken."""
        _show_true(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        """Show the true weights."""
        _show_true(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Leave the true weights in the module."""
        _show_true(trainer)

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """End the optimizers' threads."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for optimizer in _optimizers(trainer):
            optimizer.close()


def _optimizers(trainer: Trainer) -> list[ZenFlowAdamW]:
    """Return the optimizers of ours in a fit; none elsewhere, where the last fit's are closed."""
    if trainer.state.fn is not TrainerFn.FITTING:
        return []
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, ZenFlowAdamW)]


def _show_true(trainer: Trainer) -> None:
    for optimizer in _optimizers(trainer):
        optimizer.eval()


def _check_release(trainer: Trainer, pl_module: LightningModule, optimizer: ZenFlowAdamW) -> None:
    """Refuse settings that release mode can't have.

    Raises:
        ValueError: A rule is broken; the message lists all that are.
    """
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # set elsewhere
    has_schedule = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
    is_counted = pl_module.automatic_optimization and not has_schedule
    rules = [
        (
            not clip,
            f"gradient_clip_val={clip} needs gradients that have left: leave it out, and make the "
            f"optimizer with max_grad_norm={clip}",
        ),
        (
            not is_counted or accumulated == optimizer.accumulation_steps,
            f"accumulate_grad_batches is {accumulated}, and the optimizer was made for "
            f"{optimizer.accumulation_steps}: give it accumulation_steps={accumulated}",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is None,
            "release mode can't unscale gradients: use precision='bf16-mixed', or keep gradients "
            "until step()",
        ),
    ]
    broken = [text for holds, text in rules if not holds]
    if broken:
        raise ValueError("; ".join(broken))
