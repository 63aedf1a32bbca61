"""Two traces side by side, and what a trace is of."""
