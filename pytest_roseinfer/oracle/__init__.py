"""Expected contents of a cache, in plain Python lists; shares no code with any cache."""
