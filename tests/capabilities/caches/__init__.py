"""Caches for the projects that the tests make up, where they are copied to."""
