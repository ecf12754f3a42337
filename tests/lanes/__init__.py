"""Lanes of their own: every kernel under a sanitizer."""
