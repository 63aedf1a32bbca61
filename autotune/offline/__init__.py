"""Tuning before a run: studies of trials, alone or in several processes."""
