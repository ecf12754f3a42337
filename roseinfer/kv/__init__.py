"""Paged KV cache; imports nothing from the engine above it."""
