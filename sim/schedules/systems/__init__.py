"""Other projects' systems, one file each: schedule and memory."""
