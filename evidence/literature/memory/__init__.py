"""Published peaks, fits and failures of device memory."""
