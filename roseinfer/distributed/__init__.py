"""Tensor parallelism: processes (ranks) that each compute a share of one model."""
