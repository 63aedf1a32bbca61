"""What the engine asks of a device, on CUDA and on a CPU that plays one."""
