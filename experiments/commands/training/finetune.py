"""``zenflow finetune``: fine-tune a language model on chats, instructions or texts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from experiments.commands.answer import Answer
from experiments.commands.command import (
    Command,
    flags_were_right,
    given,
    option,
    with_flags,
)
from experiments.commands.flag_types import FILE, KNOWN_FOLDER, NEW_FOLDER
from experiments.commands.setting_flags import setting_flag
from experiments.commands.training.train_flags import (
    given_flags,
    given_tuning,
    knob_flags,
    run_flags,
    tuning_flags,
)
from experiments.finetuning.hub import push
from experiments.finetuning.record import RECORD, add_result, recorded_settings
from experiments.finetuning.settings import (
    DEFAULTS,
    SHARED,
    FineTuning,
    OwnSettings,
    check_packages,
    settle,
    with_dtype,
)
from experiments.finetuning.tuned import replayed_settings
from experiments.training.parts.files.runlock import LOCK, locked
from experiments.training.parts.models.fine_tuning import written
from experiments.training.parts.models.named import in_package
from experiments.training.parts.ranks.launched import Launched
from experiments.training.settings.field import Setting, written_settings
from experiments.training.settings.paths import check_named
from zenflow.errors import ConfigError

_OWN = written_settings(OwnSettings)
_MAY_CHANGE = frozenset({"resume"})
"""Flags beside which a run that goes on takes none: the others decide what it does."""
_LORA = (
    "LoRA is not what zenflow finetune is for: an adapter's AdamW states are tiny and fit any GPU "
    "that holds the model, so nothing would be offloaded. Use TRL's SFTTrainer with peft_config "
    "and plain AdamW, or leave this flag out to train all weights"
)


def _default(item: Setting) -> str:
    value = DEFAULTS.get(item.name, item.default)
    if item.name == "dtype":
        return "that of the weights"
    if item.name == "checkpointing":
        return "yes"
    return "" if value in (None, False, True) else written(value)


def _refuse_lora(context: click.Context, param: click.Parameter, value: Any) -> None:
    del param
    if value:
        raise click.UsageError(_LORA, context)


_flags = with_flags(
    option("--model", section="Model and data",
           help="Folder with weights and tokenizer, a name on the hub, or package:NAME."),
    option("--data", multiple=True, section="Model and data",
           help="File (.jsonl, .json, .csv, .tsv, .parquet, .txt), folder, or name of a data set, "
           "with :CONFIG behind it where the set has several. May be given several times."),
    option("--out", type=NEW_FOLDER, section="Run", help="Folder of the model, new or empty."),
    option("--resume", type=KNOWN_FOLDER, section="Run",
           help="Go on with the run in this folder, with its settings."),
    option("--replay", type=FILE, section="Run",
           help="Repeat the tuned run of this decisions.jsonl, bit for bit on a CPU."),
    option("--lora", "--peft", "--qlora", "lora", is_flag=True, expose_value=False, hidden=True,
           callback=_refuse_lora),
    *(setting_flag(item, section="Data, masks and evaluation",
                   default="" if item.default in (None, True, False) else written(item.default))
      for item in _OWN),
    *run_flags(SHARED, _default),
    tuning_flags,
    knob_flags,
)  # fmt: skip


@click.command(
    name="finetune",
    cls=Command,
    examples=[
        "zenflow finetune --model Qwen/Qwen3-1.7B --data chats.jsonl --out runs/mine",
        "zenflow finetune --model my-model/ --data train.csv --eval-data held_out.csv "
        "--eval-every 100 --patience 3 --out runs/mine",
        "zenflow finetune --model Qwen/Qwen3-1.7B --data chats.jsonl --auto --out runs/tuned",
        "zenflow finetune --resume runs/mine",
    ],
)
@_flags
@click.pass_context
def finetune(context: click.Context, /, **flags: Any) -> Answer:
    """Fine-tune all weights of a language model, with AdamW's states on the host.

    Rows are chats (messages), prompts and completions, instructions (instruction, input, output)
    or plain text. Answers alone are learnt, by the model's chat template. TRL's SFTTrainer trains;
    the folder is what transformers loads. Ctrl-C saves, and leaves with 130.
    """
    if flags["resume"] is not None:
        folder, settings = flags["resume"], _resumed(context, flags["resume"])
    elif flags["replay"] is not None:
        folder, settings = _replayed(context, flags)
    else:
        folder, settings = _new(context, flags)
    check_packages(settings.own)
    if Launched.here().count > 1:
        raise ConfigError(
            "zenflow finetune is one process, and a launcher has started several: start it "
            "without one; docs/guides/many-gpus.md has several GPUs"
        )
    flags_were_right(context)
    if flags["resume"] is None and flags["replay"] is None:
        settings = with_dtype(settings, shared_flags(context)[0])
    with locked(folder):
        if flags["resume"] is None and any(path.name != LOCK for path in folder.iterdir()):
            again = f", or go on with it by --resume {folder}" * (folder / RECORD).is_file()
            raise ConfigError(
                f"--out must be new or empty, but {folder} is not: choose another{again}"
            )
        return _run(settings, folder, resume=flags["resume"] is not None)


def _new(context: click.Context, flags: dict[str, Any]) -> tuple[Path, FineTuning]:
    missing = [f"--{name}" for name in ("model", "data", "out") if not flags[name]]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given: see the examples of --help")
    folder: Path = flags["out"]
    model = in_package(flags["model"])
    check_named(model, "--model")
    for name in flags["data"]:
        check_named(name, "--data")
    shared, knobs = shared_flags(context)
    if shared.get("eval_data") is not None:
        check_named(shared["eval_data"], "--eval-data")
    return folder, settle(model, flags["data"], shared, knobs, _own(context))


def shared_flags(context: click.Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return shared settings, those of a tuned run included, and knobs on the command line."""
    found, knobs = given_flags(context)
    shared = {name: value for name, value in found.items() if name in SHARED}
    return {**shared, **given_tuning(context)}, knobs


def _replayed(context: click.Context, flags: dict[str, Any]) -> tuple[Path, FineTuning]:
    if not flags["out"]:
        raise ConfigError("--out must be given: --replay makes a model of its own")
    shared, knobs = shared_flags(context)
    others = [*knobs, *(name for name in ("model", "data") if flags[name])]
    return flags["out"], replayed_settings(flags["replay"], shared, _own(context), others)


def _own(context: click.Context) -> dict[str, Any]:
    names = given(context)
    return {item.name: names[item.key] for item in _OWN if item.key in names}


def _resumed(context: click.Context, folder: Path) -> FineTuning:
    others = sorted(set(given(context)) - _MAY_CHANGE)
    if others:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(f"--resume takes all settings from the run itself: leave out {flags}")
    return recorded_settings(folder)


def _run(settings: FineTuning, folder: Path, *, resume: bool) -> Answer:
    """Run, say how it ended, and return that."""
    from experiments.finetuning.run import fine_tune  # loads torch, which help must not
    from experiments.output.bar import wide_console
    from experiments.output.progress import Reporter
    from experiments.training.run.ending import how_to_load, out_of_memory, stop_notice
    from experiments.training.run.stop import StopRequest

    reporter = Reporter(wide_console())
    resume_line = shlex.join(["zenflow", "finetune", "--resume", str(folder)])
    with StopRequest(stop_notice(saves=settings.run.checkpoint)) as stop:
        try:
            result = fine_tune(settings, folder, reporter, stop, resume=resume)
        except KeyboardInterrupt:
            if not stop.requested:
                raise
            reporter.finish()
            reporter.say(f"Ended at once. If anything was saved, go on with: {resume_line}")
            record = {"folder": str(folder), "stopped": True, "resume": resume_line}
            return Answer(record=record, code=stop.exit_code)
        except (MemoryError, RuntimeError) as error:
            refused = out_of_memory(error)
            if refused is None:
                raise
            raise refused from error
        finally:
            reporter.close()
    figures = {**result.figures, "model": None if result.stopped else str(folder)}
    add_result(folder, figures)
    record = {"folder": str(folder), "stopped": result.stopped, **figures}
    if result.stopped:
        name = stop.signal.name if stop.signal else "a signal"
        saved = f"everything is saved. Go on with: {resume_line}"
        if not settings.run.checkpoint:
            saved = "nothing of it can be resumed, as --no-checkpoint asked"
        reporter.say(f"Stopped by {name} after step {figures['steps']}; {saved}")
        return Answer(record={**record, "resume": resume_line}, code=stop.exit_code)
    loss = figures["eval_loss"]
    told = f", held-out loss {loss:.4f}" if loss is not None else ""
    best = f" of {Path(figures['best_checkpoint']).name}" if figures["best_checkpoint"] else ""
    reporter.say(f"{figures['steps']} steps{told}. The model{best} is in {folder}")
    reporter.say(how_to_load(folder))
    repository = settings.own.push_to_hub
    if repository is not None:  # last, so that whatever the hub says, the run is whole
        record["pushed_to"] = push(repository, folder)
        reporter.say(f"The model has been pushed to {record['pushed_to']}")
    return Answer(record=record)
