"""Files of a run: checkpoints, the step log, and the lock on the folder."""
