"""Models that several processes compute together."""
