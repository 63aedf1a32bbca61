"""Settings of a training run: fields, rules, and the file that holds them. Nothing loads torch."""
