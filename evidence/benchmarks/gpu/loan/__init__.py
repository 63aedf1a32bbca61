"""A GPU that is lent for some minutes: five calls that need no thought while it is there."""
