"""Parts of the adapters for this distribution's own cache and engine."""
