"""Accuracy on a real task: sentiment of SST-2's sentences under every strategy."""
