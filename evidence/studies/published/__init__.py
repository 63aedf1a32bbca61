"""Published measurements of others' machines beside their predictions."""
