"""Requests served, and timed."""
