"""Runs that a controller tunes, and their replay."""
