"""A run's decisions, as they are written and read again."""
