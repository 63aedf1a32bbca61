"""Streamed weights: layers whose weights live on the host, and visit the device to be used."""
