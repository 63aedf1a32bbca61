"""What a run leaves: a row for each step, and figures computed from them."""
