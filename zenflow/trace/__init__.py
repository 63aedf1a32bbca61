"""What ran when: recorded, queried, and written as a Chrome trace."""
