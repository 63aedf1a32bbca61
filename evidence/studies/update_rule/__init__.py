"""What each knob of the update rule is worth."""
