"""Lanes of CI that run every kernel under a sanitizer."""
