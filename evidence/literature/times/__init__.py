"""Published times of steps and host passes, by what they are of."""
