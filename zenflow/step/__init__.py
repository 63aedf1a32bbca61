"""One optimizer step: its gradients on the device, on the host, and the weights that come back."""
