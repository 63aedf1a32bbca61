"""AdamW's states on a drive: extents in a file, two places for each, and a manifest."""
