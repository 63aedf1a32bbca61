"""What late updates cost in steps of AdamW."""
