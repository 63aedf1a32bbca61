"""The tuner on the real engine, beside the best of fixed settings."""
