"""Tuning while a run goes on: controllers, and the rules by which they try settings."""
