"""Search for an example that fails a check, shrinking, and replay."""
