"""What a cache stores and computes from it: a file for each thing that must hold of it."""
