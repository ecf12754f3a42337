"""Failures of caches and engines: messages, pictures, and data for reports."""
