"""Other optimizers on the model, weights, batches and clip norm of our own benchmark."""
