"""What is drawn and printed of a sweep's table."""
