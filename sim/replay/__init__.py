"""Event simulation of a recorded schedule on many machines, in C."""
