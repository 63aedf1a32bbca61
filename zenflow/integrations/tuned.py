"""A Trainer's run that is tuned while it goes on: its facts, decisions file, and log rows."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from zenflow.errors import ConfigError
from zenflow.surface.arguments import checked_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autotune.decisions.records import Decision
    from autotune.online.tuner import TunedRun
    from autotune.online.tuning import Tuning
    from sim.models.workload import Workload

_OF_RUN = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "bf16", "fp16", "seed", "data_seed",
)  # fmt: skip
"""Arguments of the Trainer on which weights depend: a run that goes on, or repeats, has them."""
_ROWS = 64
"""First rows of a data set, whose longest one stands for the tokens of a batch's sequences."""
_SECONDS = "zenflow"
"""Name under which the Trainer's state keeps the seconds of all steps."""


class TunedCourse(TrainerCallback):
    """Tunes one run of a trainer: decides beside it, writes decisions down, and logs them."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Any]) -> None:
        """Take the options, before any work.

        Args:
            trainer: The trainer, whose log gets a row for each decision.
            options: Options of `autotune.online.tuner.Tuner` by name; `replay`, a decisions file
                to be repeated; `workload`, a `sim.models.workload.Workload` in place of that of
                the trainer's model and rows; `command`, JSON values that the file shall keep.

        Raises:
            ConfigError: An option is unknown, or breaks its rule.
        """
        own = dict(options)
        self._workload: Workload | None = own.pop("workload", None)
        self._command = own.pop("command", None)
        self._replay = own.pop("replay", None)
        if self._replay is not None and own:
            raise ConfigError(
                f"auto's replay takes the decisions of its file, and {', '.join(own)} would be of "
                "no effect: leave it out"
            )
        # By name: zenflow imports no package above it.
        self._tuner = import_module("autotune.online.tuner").Tuner.of(own)
        self._of = weakref.ref(trainer)  # or its optimizer would live until a collection
        self._resumed: Path | None = None
        self._began = self._seconds = 0.0
        self._logged = 0
        self.tuning: Tuning | None = None

    # ---- before the first step --------------------------------------------------------------

    @contextmanager
    def training(self, checkpoint: str | bool | None) -> Iterator[None]:
        """Note from where a run goes on; end the tuner's search and close its file behind it.

        Args:
            checkpoint: As `Trainer.train` takes it.

        Raises:
            RuntimeError: The trainer has trained before.
        """
        if self.tuning is not None:
            raise RuntimeError(
                "a tuned trainer trains once, so that its decisions repeat the run: make another "
                "trainer to go on, or to train anew"
            )
        newest: Any = get_last_checkpoint
        found = newest(self._args.output_dir) if checkpoint is True else checkpoint
        self._resumed = Path(found) if found else None
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        if self.tuning is not None:
            self.tuning.close()

    def begin(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which the optimizer is tuned, its decisions file being open.

        Args:
            options: Arguments of the optimizer without a tuner.

        Raises:
            ConfigError: The run can't be tuned, or the file's run is another one.
            CheckpointError: The checkpoint is of a run that was not tuned.
        """
        run = self._run(options)
        tunings: Any = import_module("autotune.online.tuning")
        path = Path(self._args.output_dir, tunings.DECISIONS)
        if self._replay is not None:
            tunings.check_same_run(Path(self._replay), run.settings)
            self.tuning = tunings.replayed(Path(self._replay), run.total_steps)
        elif self._resumed is not None:
            self.tuning = tunings.resumed(self._tuner, run, path, self._resumed)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.tuning = tunings.Tuning.begin(self._tuner, self._tuner.starting(run), path)
        assert self.tuning is not None
        self._logged = len(self.tuning.decisions)
        wanted = self.tuning.controller.timeline_steps
        return {
            "config": self.tuning.start.applied_to(run.config),
            "controller": self.tuning.controller,
            "timeline_steps": max(options.get("timeline_steps", 0), wanted),
        }

    @property
    def _trainer(self) -> Trainer:
        trainer = self._of()
        assert trainer is not None  # it is at work
        return trainer

    @property
    def _args(self) -> Any:
        return self._trainer.args

    def _run(self, options: Mapping[str, Any]) -> TunedRun:
        """Return the facts of the run that the tuner must know.

        Raises:
            ConfigError: The number of steps is not known yet.
        """
        args, device, link = self._args, self._args.device, options.get("link")
        if self._trainer.state.max_steps < 1:
            raise ConfigError(
                "auto must know the run's steps before its optimizer is made: let train() make "
                "it, of transformers 5 or newer"
            )
        config = checked_config(options["config"])
        steps, is_cpu = self._trainer.state.max_steps, device.type == "cpu"
        settings = {name: getattr(args, name, None) for name in _OF_RUN}
        settings |= {"steps": steps, "rule": config.to_dict(), "command": self._command}
        run: TunedRun = import_module("autotune.online.tuner").TunedRun(
            config=config,
            workload=self._workload_of_run,
            total_steps=steps,
            settings=json.loads(json.dumps(settings)),  # as they will be read again
            gpu_bytes=None if is_cpu else torch.cuda.get_device_properties(device).total_memory,
            releases=options["offload_gradients"] == "release",
            link=None if link is None else (link.d2h_bytes_per_second, link.h2d_bytes_per_second),
            seed=args.seed,
        )
        return run

    def _workload_of_run(self) -> Workload:
        """Return the simulator's workload of the trainer's model and batches.

        Raises:
            ConfigError: The simulator does not know the model's family, some of its weights are
                frozen, or nobody says how long sequences are.
        """
        if self._workload is not None:
            return self._workload
        args, model = self._args, cast("PreTrainedModel", self._trainer.model)
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        if frozen:
            raise ConfigError(
                f"auto's simulator trains all weights, and {frozen:,} are frozen here: leave auto "
                "out, or give it the controller 'zen-auto', which needs no simulator"
            )
        workload: Workload = import_module("sim.models.workload").Workload.of_config(
            "the trainer's model",
            model.config.to_dict(),
            batch_size=args.per_device_train_batch_size,
            sequence=self._sequence(),
            accumulation=args.gradient_accumulation_steps,
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            checkpointing=bool(
                args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
            ),
        )
        return workload

    def _sequence(self) -> int:
        """Return the tokens of a batch's sequences, as the first rows have them."""
        rows: Any = self._trainer.train_dataset
        if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
            first = [rows[place] for place in range(min(_ROWS, len(rows)))]
            lengths = [len(row["input_ids"]) for row in first if "input_ids" in row]
            if lengths:
                return max(lengths)
        longest = getattr(self._args, "max_length", None)
        if not isinstance(longest, int):
            raise ConfigError(
                "auto can't tell how many tokens a sequence has, as the rows have no input_ids: "
                "say so by auto={'workload': Workload.of_config(...)} of sim.models.workload"
            )
        return longest

    # ---- while the run goes on --------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up the seconds of the steps before a resume."""
        self._seconds = state.stateful_callbacks.get(_SECONDS, {}).get("seconds", 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the step's clock."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock; log what was decided."""
        self._seconds += time.perf_counter() - self._began
        state.stateful_callbacks[_SECONDS] = {"seconds": self._seconds}
        assert self.tuning is not None
        logs = control.should_log
        for decision in self.tuning.decisions[self._logged :]:
            self._trainer.log(_row(decision))
            self._logged += 1
        control.should_log = logs  # which a row of its own would have answered

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the end record of a run that has taken all its steps."""
        assert self.tuning is not None
        if state.global_step >= state.max_steps:
            self.tuning.end(state.global_step, self._seconds)

    def save(self, optimizer: Any, folder: str) -> None:
        """Put a copy of the decisions into a checkpoint.

        Raises:
            CheckpointError: The file lacks decisions that the engine has carried out.
        """
        assert self.tuning is not None
        self.tuning.save(optimizer, self._trainer.state.global_step, Path(folder))


def _row(decision: Decision) -> dict[str, float]:
    """Return the numbers of a decision as a row of the log; its reason is in the file."""
    row = {
        "decision_step": decision.step,
        **decision.new.to_dict(),
        "gain": decision.gain,
        "predicted_step_seconds": decision.predicted_step_seconds,
        "measured_step_seconds": decision.measured_step_seconds,
    }
    return {f"zenflow/{name}": value for name, value in row.items() if value is not None}


def tuned_rules(trainer: Any, options: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return the rules of a tuned trainer: pairs of whether one holds, and its text.

    Args:
        trainer: The trainer.
        options: Arguments of the optimizer that were given.
    """
    args = trainer.args
    return [
        (
            options.get("state_dir") is None,
            "state_dir has no tuner yet, whose simulator knows no drive: leave it out",
        ),
        (
            options.get("controller") is None,
            "auto and the controller in optimizer_options both choose knobs: leave one out",
        ),
        (
            args.world_size == 1 and args.n_gpu <= 1,
            f"auto is for one process with one GPU, and there are {args.world_size} with "
            f"{args.n_gpu}: leave it out, or hide the others with CUDA_VISIBLE_DEVICES",
        ),
        (
            not args.auto_find_batch_size,
            "auto simulates the batch, which auto_find_batch_size changes: leave one out",
        ),
    ]
