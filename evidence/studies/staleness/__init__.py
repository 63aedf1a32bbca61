"""Cost of late updates in steps of AdamW."""
