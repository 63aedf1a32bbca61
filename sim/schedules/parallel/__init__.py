"""Several devices that share a model: whole weights on each, or each layer in parts."""
