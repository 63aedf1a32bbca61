"""Files of `zenflow tune`, and trials that are really run."""
