"""The paged KV cache. Imports nothing from the engine above it."""
