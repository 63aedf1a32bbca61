"""Schedules: the work of each lane in order, one strategy a file, each a readable generator."""
