"""What a training run is asked for: fields, rules, and the file that holds them."""
