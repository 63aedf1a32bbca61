"""Late updates without loss: rules for weights that a slow host keeps, with logical delays."""
