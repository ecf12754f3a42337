"""What can be done to a cache: a file for each operation, which registers itself."""
