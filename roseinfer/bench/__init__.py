"""Benchmarks, run as ``python -m roseinfer.bench NAME``. They measure, and do not test results."""
