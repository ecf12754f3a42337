"""The engine: scheduling, forward passes, prefix caching and speculative decoding."""
