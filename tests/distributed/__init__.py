"""Models that are computed by several processes."""
