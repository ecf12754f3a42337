"""The kernel of a whole decode step."""
