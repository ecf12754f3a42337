"""The paged KV cache: each fast path compared with the per-token one."""
