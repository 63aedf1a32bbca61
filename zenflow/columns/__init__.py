"""Columns: their owners, and the memory of their state."""
