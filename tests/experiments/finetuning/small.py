"""A small model with a chat template, rows for it, and runs of the command in this process."""

import copy
import json
import random

from click.testing import CliRunner
from safetensors.torch import load_file

from experiments.cli import main
from tests.zenflow.integrations.tiny import decoder, word_tokenizer

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w4 {% generation %}"
    "{{ m['content'] + ' ' + eos_token }}{% endgeneration %} "
    "{% else %}{{ 'w3 ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)
"""Chat template that marks answers: w3 before a question, w4 before an answer."""
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FAST = ("--device", "cpu", "--device-threads", "1", "--sequence", "64", "--min-split-elements",
        "1024", "--lr", "0.005", "--eval-share", "0", "--sample-tokens", "0")  # fmt: skip
"""Flags of a run whose larger matrices are split, and whose steps take milliseconds."""


def save_model(folder, template=MARKED, **sizes):
    """Save a model of these sizes, and its tokenizer."""
    model = decoder()
    if sizes:
        shape = copy.deepcopy(model.config)
        shape.update(sizes)
        model = type(model)(shape)
    model.save_pretrained(folder)
    tokenizer_of(template).save_pretrained(folder)
    return folder


def tokenizer_of(template=MARKED):
    """Return the tokenizer with a chat template."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def words(count, seed):
    """Return text of so many of the tokenizer's words."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(5, 48)}" for _ in range(count))


def chat(seed=0):
    """Return two questions with their answers."""
    said = [words(2 + (seed + place) % 3, 10 * seed + place) for place in range(4)]
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": r, "content": s} for r, s in zip(roles, said, strict=True)]}


def write_rows(path, rows):
    """Write rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def finetune(*flags):
    """Run the command with these flags."""
    return CliRunner().invoke(main, ["finetune", *map(str, flags)])


def tuned(out, *flags):
    """Run the command into ``out``; the run must succeed."""
    ran = finetune("--out", out, *flags)
    assert ran.exit_code == 0, ran.output
    return ran


def weights(folder):
    """Return the weights that a folder holds, by name."""
    return load_file(folder / "model.safetensors")


def losses(out):
    """Return the training losses in a run's newest checkpoint."""
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]
