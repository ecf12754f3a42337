"""Who runs the engine for a server: its own process, or one of the engine's own."""
