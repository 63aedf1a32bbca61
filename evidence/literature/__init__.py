"""What others published, with its sources."""
