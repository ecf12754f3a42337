"""Shipped tests: ``pytest --pyargs pytest_roseinfer.suite --roseinfer-target m:Class``."""
