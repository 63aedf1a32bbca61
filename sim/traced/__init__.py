"""A user's own training as torch.profiler traced it: read, and taken apart into its passes."""
