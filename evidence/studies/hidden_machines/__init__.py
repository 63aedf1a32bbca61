"""The tuner on simulated machines whose truth it does not know."""
