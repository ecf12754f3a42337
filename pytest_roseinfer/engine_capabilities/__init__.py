"""Capabilities of an engine: a module for each, with all that tests it."""
