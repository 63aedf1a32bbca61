"""The paper's figures of loss and accuracy."""
