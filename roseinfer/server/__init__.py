"""OpenAI-compatible HTTP server over one engine: ``roseinfer serve``."""
