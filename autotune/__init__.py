"""Tuner: chooses the engine's settings, offline over the simulator or while a run goes on.

It sees both sides, the engine's reports and the simulator's predictions, and steers through
``zenflow.AbstractIntervalController``. What it optimises is goodput, tokens per second times
statistical efficiency, never the step time alone.
"""
