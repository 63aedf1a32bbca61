"""Others' published runs: measured times and peaks of memory, read from `evidence/data`."""
