"""A pretrained language model, fine-tuned under every rule on chats and on plain text."""
