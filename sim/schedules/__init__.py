"""Schedules: who does what when, one strategy a file; each a generator that reads as it runs."""
