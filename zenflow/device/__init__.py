"""Device operations that the engine needs, on CUDA and on a CPU in the role of a device."""
