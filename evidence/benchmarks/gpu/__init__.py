"""Benchmark of `make gpu` on a CUDA device, and the page made of its records."""
