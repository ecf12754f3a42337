"""Parts of the adapters for transformers' caches."""
