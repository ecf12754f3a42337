"""What downstream users write, and what is found wrong with it."""
