"""Pictures and texts of a sweep's table."""
