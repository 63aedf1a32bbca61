"""The search behind `zenflow plan`: what fits a machine, what is fastest, what to change."""
