"""A GPU that is lent for some minutes: six calls that need no thought while it is there."""
