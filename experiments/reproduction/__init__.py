"""The paper's figures made again: each is a function from a record, with a verdict on its claims."""
