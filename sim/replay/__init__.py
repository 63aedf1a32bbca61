"""Simulation of a recorded schedule on many machines at once, in C."""
