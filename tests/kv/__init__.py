"""The paged KV cache, each fast path against the per-token one."""
