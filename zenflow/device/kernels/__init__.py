"""Kernels of the engine's own pass over gradients and weights on a device."""
