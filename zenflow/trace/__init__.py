"""Timelines: spans of work, recorded, queried, and written as a Chrome trace."""
