"""What a run teaches: the simulator refitted, its residual, the machine's noise."""
