"""What the host does with gradients: when, and by which of the two update rules."""
