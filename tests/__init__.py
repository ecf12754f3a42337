"""The tests of roseinfer and of its pytest plugin."""
