"""What happens before the first step: checks, an estimate of the time, the run's objects."""
