"""Steady states by formulas, for thousands of machines at once."""
