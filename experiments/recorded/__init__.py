"""Recorded accuracy of settings, as data that ships with the package."""
