"""The process that answers what to try next: questions, forecasts, search."""
