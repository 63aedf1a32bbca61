"""Several processes that train one model: how they start, and how they share work."""
