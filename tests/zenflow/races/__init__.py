"""A checker of the order among streams and threads: it runs the engine for a GPU without one.

Streams and host threads are *agents*, each with a vector clock. An event, a completion or a task
that is handed over carries a clock from one agent to another. Every access to memory is compared
with those before it. Two agents, one of them writing, and no clock between them: that is a race,
whether or not it happened this time.

What happens to be seen early orders nothing: that a copy has ended may always be noticed later.
Two threads that launch on one stream are in order only if something brought them into one.
"""
