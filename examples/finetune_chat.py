"""Fine-tune a chat model on rows of messages with TRL's SFTTrainer, its optimizer on the host.

    python finetune_chat.py --model Qwen/Qwen3-1.7B --train_file chats.jsonl --output_dir out \
        --learning_rate 1e-5 --num_train_epochs 1

A row of the JSONL is {"messages": [{"role": "user", "content": "..."}, ...]}, which the model's
chat template turns into text, or {"prompt": "...", "completion": "..."}. Every flag of TRL's
SFTConfig works. Copy this file and make it yours.
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from zenflow.integrations.transformers import ZenFlowTrainerMixin


@dataclass
class Arguments:
    model: str = field(metadata={"help": "Name on the hub, or folder, of model and tokenizer."})
    train_file: str = field(metadata={"help": "JSON lines to train on."})


class ZenFlowSFTTrainer(ZenFlowTrainerMixin, SFTTrainer):
    """SFTTrainer whose optimizer has its state on the host."""


def main():
    """Show the first row as the model sees it, train, and save the true weights."""
    arguments, training = HfArgumentParser((Arguments, SFTConfig)).parse_args_into_dataclasses()
    trainer = ZenFlowSFTTrainer(
        model=arguments.model,
        args=training,
        train_dataset=load_dataset("json", data_files=arguments.train_file, split="train"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
    )
    first = next(iter(trainer.train_dataset))["input_ids"]
    print("first row:", repr(trainer.processing_class.decode(first)))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
