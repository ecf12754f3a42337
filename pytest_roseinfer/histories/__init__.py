"""Histories: the steps done to a cache, and how they are drawn."""
