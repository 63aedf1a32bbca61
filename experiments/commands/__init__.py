"""One file for each command of `zenflow`: flags and words, no logic."""
