"""Parts of a run: its data, model, ranks and files, and ``RunSetup``, which has them together."""
