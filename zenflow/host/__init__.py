"""The host's arithmetic: kernels in C and in torch, their threads, their memory."""
