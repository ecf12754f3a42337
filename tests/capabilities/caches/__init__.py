"""Caches that are copied into the test projects."""
