"""Attention over the paged cache: backend protocol, torch reference and Triton backend."""
