"""Histories of operations on a cache, and how they are drawn."""
