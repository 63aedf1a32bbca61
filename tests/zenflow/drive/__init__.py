"""States on a drive: bits, traffic, crashes, faults."""
