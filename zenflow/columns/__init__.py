"""Who owns which column, and where its numbers lie."""
