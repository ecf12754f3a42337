"""Histories that are large, which nobody draws."""
