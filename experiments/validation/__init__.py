"""Predictions of runs that calibrated nothing, beside what was measured."""
