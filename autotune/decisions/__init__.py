"""Decisions of a run: records, and the file that keeps them."""
