"""How much memory each device and the host need, part by part."""
