"""Sweeps: a prediction for every point of a grid of machines, workloads and settings."""
