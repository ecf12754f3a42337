"""The cost of an append to the KV cache: what is timed, on what, and the report of it."""
