"""Decode steps: what they are made of, and what each optimisation is worth."""
