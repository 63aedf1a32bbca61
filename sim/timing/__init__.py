"""What a step costs: shapes to seconds, the engine's blocks, phases of a step."""
