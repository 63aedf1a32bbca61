"""Models of a run: the simulator refitted, its residual, the machine's noise."""
