"""Gradients between backward and the optimizer step."""
