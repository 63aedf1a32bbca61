"""Between a caller and the engine: arguments, construction, hooks, state, true weights."""
