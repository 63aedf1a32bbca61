"""Commands about training, and about the files that describe one."""
