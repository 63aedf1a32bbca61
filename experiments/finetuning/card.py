"""Model card: the README of a fine-tuned model, with its base, its training and its loss.

TRL's own card names the base of a model from a folder, and the model itself, ``None``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
import trl
from huggingface_hub import ModelCardData

from experiments.finetuning.settings import FineTuning
from experiments.training.parts.models.fine_tuning import written

CARD = "README.md"
_TEXT = """\
---
{data}
---

# {title}

{base}, with all of its weights fine-tuned by [TRL](https://github.com/huggingface/trl)'s \
`SFTTrainer`. {optimizer}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

| training | |
|---|---|
{table}
"""


def card(settings: FineTuning, folder: Path, steps: int, held_out_loss: float | None) -> str:
    """Return the text of a model's card. Paths of this machine are not in it.

    Args:
        settings: How the model was trained.
        folder: The model's; the card has its last part, where the model is not pushed.
        steps: Optimizer steps that the model has learnt.
        held_out_loss: Mean loss a token of held-out rows, in nats; None where there are none.
    """
    run, on_hub = settings.run, _is_on_hub(settings.run.model)
    link = f"[{run.model}](https://huggingface.co/{run.model})"
    name = settings.own.push_to_hub or folder.name
    figures = {
        "held-out loss": None if held_out_loss is None else f"{held_out_loss:.4f}",
        "steps": f"{steps:,}",
        "rows a step": f"{run.batch_size * run.grad_accum:,}",
        "longest row": f"{run.sequence:,} tokens",
        "learning rate": f"{written(run.lr)}, {run.schedule}, rises over {run.warmup:.3g} of the "
        "steps",
        "betas, weight decay": f"{written(run.betas)}, {written(run.weight_decay)}",
        "weights": run.dtype,
        "packages": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"trl {trl.__version__}",
    }
    return _TEXT.format(
        data=_data(settings, on_hub).to_yaml(),
        title=name.rpartition("/")[2],
        base=link if on_hub else f"The model of a folder, `{Path(run.model).name}`",
        optimizer=_optimizer(settings),
        name=name,
        table="\n".join(f"| {key} | {value} |" for key, value in figures.items() if value),
    )


def _is_on_hub(name: str) -> bool:
    """Return whether a setting names something on the hub: paths are whole in settings."""
    return not Path(name).is_absolute()


def _data(settings: FineTuning, on_hub: bool) -> ModelCardData:
    """Return the fields that the hub reads. Files and folders of this machine are left out."""
    sets = [name.partition(":")[0] for name in settings.data if _is_on_hub(name)]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sft", "trl"],
        base_model=settings.run.model if on_hub else None,
        datasets=sets or None,
    )


def _optimizer(settings: FineTuning) -> str:
    config = settings.config
    if settings.run.strategy == "on_device":
        return "The optimizer was AdamW."
    knobs = f"k = {config.topk_ratio:g}, S = {config.update_interval}"
    if settings.run.controller is not None:
        knobs += " at first, tuned while the model learnt"
    rule = "published rule" if config.update_rule == "published" else "AdamW, states on the host"
    return f"The optimizer was ZenFlow's ({rule}): {knobs}."
