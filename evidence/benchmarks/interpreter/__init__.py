"""Load of a step on the interpreter: measured on a decoder of 1B parameters, shrunk."""
