"""Work that runs beside the training thread: copies each way, and the host's tasks."""
