"""Benchmarks, run as ``python -m roseinfer.bench NAME``. They measure; they check nothing else."""
