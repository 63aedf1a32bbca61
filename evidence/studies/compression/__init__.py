"""Formats of few bytes on tensors of a real training: error, ratio and speed."""
