"""Studies: each measures something and judges what it claims."""
