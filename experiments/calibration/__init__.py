"""Calibration: what this machine takes for the engine's own parts, as a hardware profile."""
