"""Traces of a user's own training by torch.profiler: read, and divided into passes."""
