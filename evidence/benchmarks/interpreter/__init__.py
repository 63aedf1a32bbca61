"""What a step asks of the interpreter: measured on a decoder of 1B parameters, shrunk."""
