"""What outlives a run's process: checkpoints, locks, fingerprints, and resuming."""
