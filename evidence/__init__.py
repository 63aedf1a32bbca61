"""Evidence for the claims of this project: studies, published runs, benchmarks, records, pages.

No package imports this folder, and no wheel contains it.
"""
