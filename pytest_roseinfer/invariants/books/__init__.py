"""What a cache shows of its blocks and sequences: a file for each thing that must hold of it."""
