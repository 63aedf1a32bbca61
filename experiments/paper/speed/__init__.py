"""The paper's figures of time, traffic and memory."""
