"""Small tasks of GLUE: an encoder and a decoder, each with a head, fine-tuned under every rule."""
