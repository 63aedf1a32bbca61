"""Fresh steps: moves of deferred weights by gradients that the host has not applied yet."""
