"""Observations of right and wrong caches for the invariants."""
