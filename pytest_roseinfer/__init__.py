"""The pytest plugin and harness."""
