"""Common parts of all studies: cells, findings, records, verdicts, progress, plots."""
