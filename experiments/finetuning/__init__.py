"""Fine-tuning on chats, instructions and texts: TRL's SFTTrainer with `ZenFlowAdamW`."""
