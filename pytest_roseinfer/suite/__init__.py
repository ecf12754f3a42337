"""The tests themselves: ``pytest --pyargs pytest_roseinfer.suite --roseinfer-target m:Class``."""
