"""What `zenflow tune` leaves, and trials that are really run."""
