"""Worth of each knob of the update rule."""
