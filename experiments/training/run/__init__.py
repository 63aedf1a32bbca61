"""A run as it goes on: launch, comparison, the training loop, and results."""
