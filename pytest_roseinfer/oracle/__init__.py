"""What a right cache would hold, in plain Python lists; it shares no code with any cache."""
