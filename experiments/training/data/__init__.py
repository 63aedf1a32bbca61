"""From texts to batches."""
