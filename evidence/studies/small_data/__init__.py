"""Fine-tuning on few sentences, over and over: where a rule that fits sooner generalises less."""
