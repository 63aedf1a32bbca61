"""``zenflow convert``: what becomes of a DeepSpeed JSON, key by key, and what to run instead."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.commands.answer import Answer, Exit
from experiments.commands.command import OUTPUT, Command, option
from experiments.commands.flag_types import PATH, OutputFile
from experiments.commands.training.config_file import read_config_file, settle_auto
from experiments.commands.training.train_flags import DATA, flags_of
from zenflow.errors import ConfigError

if TYPE_CHECKING:
    from zenflow.deepspeed.outcomes import KeyOutcome
    from zenflow.deepspeed.settings import DeepSpeedSettings

_LONGEST_VALUE = 30


@click.command(
    cls=Command,
    name="convert",
    examples=[
        "zenflow convert ds_config.json --output run.toml",
    ],
)
@click.argument("source", type=PATH, metavar="DEEPSPEED.json")
@option(
    "--output", type=OutputFile(".toml", ".json"), section=OUTPUT,
    help="Settings for `zenflow train --config`: TOML, or .json.",
)  # fmt: skip
def convert_command(source: Path, output: Path | None) -> Answer:
    """Explain each key of a DeepSpeed JSON, and how to train as it says.

    Ends with code 2 if a key would change results and can't be honoured.
    """
    from experiments.commands.training.convert_lines import python_lines
    from zenflow.deepspeed.outcomes import read_with_outcomes

    # Epochs are counted in steps once the data is known; until then any number is as good.
    found, outcomes = read_with_outcomes(source, steps_per_epoch=1)
    _check_kind(source, outcomes)
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    num_keys = sum(outcome.is_in_file for outcome in outcomes)
    lines = [f"{source}: {num_keys} keys, {len(refused)} refused\n", *_table(outcomes)]
    record: dict[str, Any] = {"keys": [asdict(outcome) for outcome in outcomes]}
    if found is None:
        lines += ["\nNothing is converted: mend what is refused, then give this command again."]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table has said it
            settings, knobs = read_config_file(source, num_gpus=found.num_gpus)
        if output is not None:
            _write(output, source, settings, knobs)
        lines += _answer(found, settings, knobs, output or source)
        record |= {
            "python": list(python_lines(found)),
            "command": _command(settings, knobs, output or source),
            "notes": list(_notes(found)),
        }
        if output is not None:
            record["output"] = str(output)
            lines += [f"\nSettings: {output}"]
    return Answer(
        record=record,
        show=lambda: click.echo("\n".join(lines)),
        code=Exit.REFUSED if found is None else Exit.DONE,
    )


def _check_kind(source: Path, outcomes: Sequence[KeyOutcome]) -> None:
    """Refuse a file without one of DeepSpeed's keys: it is of another kind.

    Raises:
        ConfigError: It is one.
    """
    from zenflow.deepspeed.keys import COMMENT, known_names

    keys = {o.key.split(".")[0] for o in outcomes if o.is_in_file and o.words != COMMENT}
    if keys and not keys & set(known_names("")):
        raise ConfigError(
            f"{source} has none of DeepSpeed's keys, but {', '.join(sorted(keys))}: give the JSON "
            "that DeepSpeed is started with"
        )


def _table(outcomes: Sequence[KeyOutcome]) -> Iterator[str]:
    rows = [(_shown(outcome), outcome.kind, outcome.words) for outcome in outcomes]
    width = max((len(shown) for shown, _, _ in rows), default=0)
    for shown, kind, words in rows:
        yield f"{shown:{width}}  {kind:10}  {words}"


def _shown(outcome: KeyOutcome) -> str:
    if not outcome.is_in_file:
        return f"{outcome.key} (absent)"
    value = json.dumps(outcome.value)
    if len(value) > _LONGEST_VALUE:
        value = f"{value[: _LONGEST_VALUE - 4]} ..."
    return f"{outcome.key} = {value}"


def _answer(
    found: DeepSpeedSettings, settings: Mapping[str, Any], knobs: Mapping[str, Any], file: Path
) -> Iterator[str]:
    """Yield the Python lines, the command, and where the two are not quite DeepSpeed's."""
    from experiments.commands.training.convert_lines import left_to_the_user, python_lines

    yield "\nIn your own loop:\n"
    yield from (f"    {line}".rstrip() for line in python_lines(found))
    left = left_to_the_user(found)
    if left:
        yield f"\nThe file leaves to you: {', '.join(left)}."
    yield "\nOr (a model and a folder of texts are yours to give):\n"
    yield "    " + _command(settings, knobs, file)
    notes = list(_notes(found))
    if notes:
        yield ""
        yield from notes


def _command(settings: Mapping[str, Any], knobs: Mapping[str, Any], file: Path) -> str:
    words = flags_of(*settle_auto(settings, knobs))
    command = ["zenflow", "train", "--data", DATA]
    return shlex.join([*command, *(["--config", str(file)] if words is None else words)])


def _notes(found: DeepSpeedSettings) -> Iterator[str]:
    yield from _notes_on_batch(found)
    if found.schedule is None:
        yield "- No scheduler: the learning rate is constant, as it is in DeepSpeed."
    if found.config.update_rule == "published":
        yield (
            "- The rule is ZenFlow's published one. The default rule keeps AdamW's accuracy: "
            'preset "zenflow", or --strategy zenflow.'
        )
    if found.config.update_rule == "published" and (found.gradient_accumulation_steps or 1) > 1:
        yield (
            "- DeepSpeed's ZenFlow puts update_interval in place of gradient_accumulation_steps, "
            "and steps on every micro-batch. Here accumulation is kept; 1 does as DeepSpeed did."
        )
    if found.optimizer.get("weight_decay"):
        yield "- `zenflow train` decays matrices only; DeepSpeed, as the lines above, everything."


def _notes_on_batch(found: DeepSpeedSettings) -> Iterator[str]:
    total, count = found.train_batch_size, found.num_gpus
    steps = found.gradient_accumulation_steps
    if total and count and steps and count > 1:
        yield (
            f"- The file is for {count} GPUs. On one a step has {total // count} samples; "
            f"accumulation of {steps * count} makes it {total} again."
        )
    has_batch = total or found.train_micro_batch_size_per_gpu
    if not has_batch and not any("batch_size" in name for name in found.auto):
        yield "- No batch size, with which DeepSpeed would stop: it is yours to give."


def _write(
    output: Path, source: Path, settings: Mapping[str, Any], knobs: Mapping[str, Any]
) -> None:
    from experiments.output.files import write_text
    from experiments.training.settings.file import file_content, toml_of

    if output.exists() and output.samefile(source):
        raise ConfigError(f"--output {output} is the DeepSpeed JSON itself: name another file")
    content = file_content(settings, knobs)
    is_json = output.suffix.lower() == ".json"
    write_text(output, json.dumps(content, indent=2) + "\n" if is_json else toml_of(content))
