"""Models: their layers, the table of known ones, and a step's workload."""
