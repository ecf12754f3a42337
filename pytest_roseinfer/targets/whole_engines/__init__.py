"""Engines of other projects, driven step by step, on models that need no GPU."""
