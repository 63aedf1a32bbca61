"""The update rule as arithmetic: blocks, windows, importance, AdamW. No threads, no devices."""
