"""Saves of a run: when they are due, what they take, and how a run goes on from one."""
