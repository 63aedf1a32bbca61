"""Benchmarks that anyone can run: `python -m benchmarks.<name>`. None is imported by a package."""
