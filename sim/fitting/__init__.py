"""From measurements to constants, and how sure they are."""
