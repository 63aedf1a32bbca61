"""Execution of a sweep: processes, machines, and the files that keep its points."""
