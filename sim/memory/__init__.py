"""Memory that each device and the host need, part by part."""
