"""A server that streams texts, timed by many clients at once."""
