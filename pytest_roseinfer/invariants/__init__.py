"""The invariants that hold after every operation: a file for each, which registers itself."""
