"""What every command leaves and shows: files, provenance, progress, plots."""
