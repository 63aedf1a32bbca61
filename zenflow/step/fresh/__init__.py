"""What the device does for a gradient that the host has not applied yet."""
