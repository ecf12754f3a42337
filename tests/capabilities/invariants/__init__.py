"""Observations for each room of invariants, of right caches and of wrong ones."""
