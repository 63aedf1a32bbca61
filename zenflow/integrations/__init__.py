"""The optimizer in other people's training loops, one module for each; each needs its extra."""
