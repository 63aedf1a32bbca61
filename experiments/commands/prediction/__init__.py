"""Commands that answer from the simulator: what a machine will do, and which setting to use."""
