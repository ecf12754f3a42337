"""Attention over the paged cache: a reference, a decode kernel, and prefill."""
