"""Calibration: constants from measurements, and how sure they are."""
