"""Text from tokens, as they come."""
