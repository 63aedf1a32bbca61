"""What becomes of gradients between backward and the optimizer step."""
