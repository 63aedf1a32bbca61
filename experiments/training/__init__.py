"""One training run, from settings to files."""
