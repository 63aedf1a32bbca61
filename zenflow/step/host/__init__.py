"""The host's work on gradients: its schedule, and its tasks under the two update rules."""
