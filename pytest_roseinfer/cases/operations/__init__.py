"""The operations on a cache: a file for each, which registers itself, in a folder of its kin."""
