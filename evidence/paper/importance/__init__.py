"""The paper's figures of where a gradient's energy is, and what a selection exchanges."""
