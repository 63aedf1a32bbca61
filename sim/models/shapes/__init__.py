"""Shapes: tensors of a model's layers, from the fields of its config.json."""
