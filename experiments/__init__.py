"""Recipes: the command line, real models and data, and the records and pictures of a run.

The only package of the project that prints, draws or writes results. Importing it loads neither
torch nor matplotlib; the modules that need them are imported when the work starts.
"""
