"""Costs of a step: shapes to seconds, the engine's blocks, phases of a step."""
