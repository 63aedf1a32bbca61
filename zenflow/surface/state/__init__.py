"""The optimizer's state: as a dictionary, in checkpoints, from and to torch's AdamW."""
