"""What `make gpu` runs on a CUDA device, and the page made of its records."""
