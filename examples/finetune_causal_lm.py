"""Fine-tune a causal language model on text files, with AdamW or with its state on the host.

    python finetune_causal_lm.py --model Qwen/Qwen3-1.7B --train_file texts.txt --zenflow \
        --output_dir out --bf16 --learning_rate 1e-5 --num_train_epochs 1

Every flag of transformers' TrainingArguments works. With --zenflow the Trainer is ZenFlowTrainer,
and nothing else changes. Copy this file and make it yours.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class Arguments:
    model: str = field(metadata={"help": "Name on the hub, or folder, of model and tokenizer."})
    train_file: str = field(metadata={"help": 'Text to train on; "texts/*.txt" for several.'})
    validation_file: str | None = field(default=None, metadata={"help": "Text to evaluate on."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a row."})
    zenflow: bool = field(default=False, metadata={"help": "Keep AdamW's state on the host."})
    keep_gradients: bool = field(
        default=False, metadata={"help": "Keep gradients until the step, as several ranks need."}
    )
    topk_ratio: float = field(default=0.1, metadata={"help": "Share of columns on the GPU, k."})
    update_interval: int = field(default=4, metadata={"help": "Steps in a window, S."})


def load_blocks(path, tokenizer, block_size):
    """Return the texts' tokens in rows of equal length, which are their own labels.

    Each file is one document, with its line breaks and an end token behind it.
    """
    files = load_dataset("text", data_files=path, split="train", sample_by="document")

    def encode(rows):
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return {"ids": [ids + ends for ids in tokenizer(rows["text"])["input_ids"]]}

    def cut(rows):
        joined = [token for row in rows["ids"] for token in row]
        last = len(joined) - block_size + 1
        blocks = [joined[i : i + block_size] for i in range(0, last, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    tokens = files.map(encode, batched=True, remove_columns=files.column_names)
    return tokens.map(cut, batched=True, remove_columns=["ids"])


def make_trainer(arguments, **given):
    """Return the Trainer: the one line that --zenflow is about."""
    if not arguments.zenflow:
        return Trainer(**given)
    from zenflow import ZenFlowConfig
    from zenflow.integrations.transformers import ZenFlowTrainer

    config = ZenFlowConfig(
        topk_ratio=arguments.topk_ratio, update_interval=arguments.update_interval
    )
    return ZenFlowTrainer(zenflow=config, release=not arguments.keep_gradients, **given)


def main():
    """Train, evaluate and save."""
    arguments, training = HfArgumentParser(
        (Arguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)

    def read(path):
        return None if path is None else load_blocks(path, tokenizer, arguments.block_size)

    trainer = make_trainer(
        arguments,
        model=model,
        args=training,
        train_dataset=read(arguments.train_file),
        eval_dataset=read(arguments.validation_file),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()  # the true weights
    trainer.save_metrics("train", result.metrics)
    if arguments.validation_file is not None:
        trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
