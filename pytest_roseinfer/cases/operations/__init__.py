"""The operations on a cache: a file for each, which registers itself."""
