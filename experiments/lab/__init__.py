"""What all studies share: cells, findings, records, verdicts, progress, plots."""
