"""Caches and engines of other projects, which import them when they are built."""
