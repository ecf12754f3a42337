"""What pytest sees: hooks, options, markers and fixtures."""

pytest_plugins = ("pytest_roseinfer.plugin.hooks",)
