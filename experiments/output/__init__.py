"""Output of every command: files, provenance, progress, plots."""
