"""Capabilities of an engine: one module each, with the tests of that capability."""
