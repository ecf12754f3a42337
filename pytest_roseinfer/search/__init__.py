"""Search for an example on which a check fails, shrinking, and replay."""
