"""A fine-tuning from its settings to a folder that plain transformers loads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from experiments.finetuning import memory
from experiments.finetuning.course import Course, evaluations
from experiments.finetuning.hub import open_repository
from experiments.finetuning.record import check_same_rows, last_checkpoint, write_record
from experiments.finetuning.rows import read_rows
from experiments.finetuning.settings import FineTuning
from experiments.finetuning.shown import beginning, marked, sample
from experiments.finetuning.template import Templated, set_template, templated
from experiments.finetuning.trainer import (
    arguments,
    load_model,
    load_tokenizer,
    make_trainer,
    pace_of,
    shape_of,
)
from experiments.finetuning.tuned import started
from experiments.output.progress import Reporter
from experiments.training.parts.first_checks import check_new_states
from experiments.training.parts.setup import choose_device, use_threads
from experiments.training.run.stop import StopRequest
from experiments.training.run.tuned.tuning import tell_decisions
from zenflow.errors import ConfigError

_LAST_LOSSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome of a run."""

    stopped: bool
    """Whether a signal ended the run before its last step."""
    figures: Mapping[str, Any]
    """Losses, times and sizes as plain JSON values."""


def fine_tune(
    settings: FineTuning, folder: Path, reporter: Reporter, stop: StopRequest, *, resume: bool
) -> Result:
    """Fine-tune a model, and leave it in a folder with its tokenizer and a card.

    Args:
        settings: What to do.
        folder: Where checkpoints and the model go.
        reporter: Shows the run.
        stop: Asked after every step whether to end early.
        resume: Whether to go on from the folder's last checkpoint.

    Raises:
        ConfigError: Model, data or machine don't go together; nothing has been trained then.
        CheckpointError: There is no checkpoint, or the data has changed.
        NoRoomError: Memory or disk is too small.
    """
    _quiet()
    checkpoint = last_checkpoint(folder) if resume else None
    if not resume:
        check_new_states(settings.run.state_dir)
    device = _device(settings)
    shape = shape_of(settings)
    config = started(settings, shape, device, checkpoint)
    placed = memory.Placed.of(settings, shape, device, config)
    memory.check(placed)
    expected = memory.expect(placed, folder, has_one=resume)
    tokenizer = load_tokenizer(settings.run.model)
    set_template(tokenizer, settings.own.chat_template)
    data = _data(settings, tokenizer)
    if settings.own.push_to_hub is not None:
        open_repository(settings.own.push_to_hub)
    reporter.say(_about(data, settings, device))
    reporter.say(memory.table(expected, device))
    if (doubt := memory.doubt(expected, device)) is not None:
        reporter.say(doubt)
    args = arguments(settings, data, folder, device)
    model = load_model(settings)
    trainer = make_trainer(settings, data, args, model, tokenizer, placed.streams)
    _check_rows(trainer, settings, folder, reporter, resume=resume)
    answers = _answers(trainer, settings)

    def told() -> None:
        tell_decisions(trainer.tuning, trainer.zenflow_optimizer, reporter)

    course = Course(reporter, stop, pace_of(settings), settings.own.patience, answers, told)
    trainer.add_callback(course)
    if checkpoint is not None:
        step = int(checkpoint.name.rpartition("-")[2])
        reporter.say(f"goes on from step {step}, saved in {checkpoint}")
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return _end(trainer, course, settings, stop, expected)
    finally:
        if trainer.zenflow_optimizer is not None:
            trainer.zenflow_optimizer.close()


def _quiet() -> None:
    """Leave progress bars and remarks of other packages out, but for their warnings."""
    import datasets
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no remark at each fork
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    library: Any = transformers.logging
    library.set_verbosity_error()
    library.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(trl|transformers|datasets|accelerate|torch)\.")


def _device(settings: FineTuning) -> torch.device:
    device = choose_device(settings.run)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"zenflow finetune is for one GPU, and this machine shows {torch.cuda.device_count()}:"
            " choose one with CUDA_VISIBLE_DEVICES=0; docs/guides/many-gpus.md has several"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    use_threads(settings.run, device, cores or 1)
    return device


def _data(settings: FineTuning, tokenizer: Any) -> Templated:
    run, own = settings.run, settings.own
    rows = read_rows(settings.data, run.eval_data, own.eval_share, run.seed)
    if rows.held_out is None and own.wants_best:
        raise ConfigError(
            f"the best weights are told by held-out rows, and of {len(rows.train)} rows none are "
            "held out: give --eval-data, or leave --keep-best and --patience out"
        )
    return templated(rows, tokenizer, mask_prompts=own.mask_prompts)


def _about(data: Templated, settings: FineTuning, device: torch.device) -> str:
    rows, run = data.rows, settings.run
    held_out = "none" if rows.held_out is None else f"{len(rows.held_out):,}"
    return (
        f"model {Path(run.model).name} ({run.dtype}) on {device}; {len(rows.train):,} "
        f"{rows.called} to train on, {held_out} held out\n{data.told}"
    )


def _check_rows(
    trainer: Any,
    settings: FineTuning,
    folder: Path,
    reporter: Reporter,
    *,
    resume: bool,
) -> None:
    """Show the first row as the model reads it, and write or check the run's record.

    Raises:
        ConfigError: No row is left to learn from.
        CheckpointError: The rows of a resumed run are not those that it began with.
    """
    rows = trainer.train_dataset
    if not len(rows):
        raise ConfigError(
            f"no row has anything to learn within --sequence {settings.run.sequence} tokens: the "
            "prompts alone are longer; raise it"
        )
    first = rows[0]
    reporter.say(marked(trainer.processing_class, first["input_ids"], first["labels"]))
    digest, full = _scanned(rows, settings.run.sequence)
    if full and not trainer.args.packing:
        reporter.say(
            f"{full} of {len(rows)} rows have {settings.run.sequence} tokens (--sequence), at "
            "which longer ones are cut"
        )
    if resume:
        check_same_rows(folder, digest)
    else:
        write_record(folder, settings, digest)


def _scanned(rows: Any, most: int) -> tuple[str, int]:
    """Return a hash of all tokens and labels in their order, and the number of full rows.

    Args:
        rows: The rows.
        most: Tokens of a row that is full.
    """
    found, full = xxhash.xxh3_64(), 0
    for batch in rows.with_format("arrow").iter(1000):
        for name in ("input_ids", "labels"):
            column = batch[name].combine_chunks()
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            found.update(column.flatten().to_numpy(zero_copy_only=False).tobytes())
            found.update(lengths.tobytes())
        full += int((lengths >= most).sum())
    return found.hexdigest(), full


def _answers(trainer: Any, settings: FineTuning) -> Any:
    """Return the function that gives a sample of answers in words; None where none is asked."""
    most, tokenizer = settings.own.sample_tokens, trainer.processing_class
    if not most:
        return None
    rows = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    prompt = beginning(rows[0]["input_ids"], rows[0]["labels"])
    asked = tokenizer.decode(prompt, skip_special_tokens=True)

    def answer(model: Any) -> str:
        optimizer = trainer.zenflow_optimizer
        assert optimizer is not None
        with optimizer.true_weights():
            said = sample(model, tokenizer, prompt, most, trainer.args.device)
        return f"Sample: {asked[-200:]!r} -> {said!r}"

    return answer


def _end(
    trainer: Any,
    course: Course,
    settings: FineTuning,
    stop: StopRequest,
    expected: memory.ExpectedMemory,
) -> Result:
    """Evaluate and save what is finished, and return the outcome."""
    steps, planned = trainer.state.global_step, trainer.state.max_steps
    stopped = stop.requested and steps < planned
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    if not stopped:
        done = [row["step"] for row in evaluations(trainer.state)]
        if trainer.eval_dataset is None:
            course.say_sample(trainer.model)
        elif best is not None or steps not in done:
            trainer.evaluate()
        trainer.save_model()
        trainer.create_model_card()
    evaluated = evaluations(trainer.state)
    last = course.losses[-_LAST_LOSSES:]
    optimizer = trainer.zenflow_optimizer
    return Result(
        stopped=stopped,
        figures={
            "steps": steps,
            "planned_steps": planned,
            "rows": len(trainer.train_dataset),
            "train_loss": sum(last) / len(last) if last else None,
            "eval_loss": evaluated[-1]["eval_loss"] if evaluated else None,
            "evaluations": evaluated,
            "best_checkpoint": best,
            "tokens": course.tokens,
            "seconds": course.seconds,
            "expected_memory": expected.to_dict(),
            "memory": optimizer.memory.to_dict() if optimizer is not None else None,
            "tuning": trainer.tuning.summary(optimizer) if trainer.tuning is not None else None,
        },
    )
