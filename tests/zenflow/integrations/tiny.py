"""A tiny decoder, texts, and the plain loop that trainers are compared with."""

from dataclasses import dataclass, field

import torch

from tests.models import weights_of
from zenflow import ZenFlowAdamW, ZenFlowConfig

VOCAB = 48
CONFIG = ZenFlowConfig(min_split_elements=1024, topk_ratio=0.25)
"""Settings under which the decoder's larger matrices are split."""
LR, MAX_NORM, WEIGHT_DECAY = 5e-3, 0.5, 0.1
both_modes = {"argnames": "release", "argvalues": [True, False], "ids": ["release", "keep"]}


def decoder(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(shape).to(dtype)


def word_tokenizer():
    """Return a tokenizer of the words w3 to w47."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(count=14, length=12, seed=0):
    """Return random token rows, each with itself as labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCAB, (count, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def make_optimizer(model, release=True, accumulation_steps=1):
    """Return the optimizer that the trainers' arguments stand for."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    mode = {}
    if release:
        mode = {"offload_gradients": "release", "max_grad_norm": MAX_NORM}
        mode["accumulation_steps"] = accumulation_steps
    return ZenFlowAdamW(groups, lr=LR, config=CONFIG, **mode)


@dataclass
class Run:
    """What a run did."""

    losses: list = field(default_factory=list)
    """Loss of each micro-batch."""
    true: list = field(default_factory=list)
    """True weights after each step."""
    seen: list = field(default_factory=list)
    """Weights that the next forward sees, after each step."""


def plain_run(
    model, steps, loss_of, *, release=True, accumulation_steps=1, divisor=1, schedule=None
):
    """Train in a loop of a few lines.

    Args:
        model: The model.
        steps: For each step its micro-batches.
        loss_of: Returns the loss of a micro-batch.
        release: Whether in release mode.
        accumulation_steps: Micro-batches in a full step.
        divisor: Divides each loss before backward.
        schedule: Makes a scheduler of the optimizer.
    """
    optimizer = make_optimizer(model, release, accumulation_steps)
    scheduler = schedule(optimizer) if schedule else None
    run = Run()
    for batches in steps:
        for batch in batches:
            loss = loss_of(batch)
            run.losses.append(loss.item())
            (loss / divisor).backward()
        if not release:
            optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        if scheduler:
            scheduler.step()
        run.seen.append(weights_of(model))
        with optimizer.true_weights():
            run.true.append(weights_of(model))
    optimizer.close()
    return run


def are_equal(left, right):
    """Whether two lists of tensors are the same bits."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


def told(record_property, trainer, release, compared, packages):
    """Note for the guide's table what is about to be compared with the plain loop.

    `evidence.benchmarks.trainer_tests` makes a record of what tests that pass have noted.
    """
    record_property("trainer", trainer)
    record_property("mode", "release" if release else "keep")
    record_property("compared", compared)
    record_property("packages", packages)
