"""Tests of the command line, data, models, records and checkpoints of real runs."""
