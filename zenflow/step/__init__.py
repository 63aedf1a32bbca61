"""One optimizer step: what becomes of its gradients, on the device, on the host, and back."""
