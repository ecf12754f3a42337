"""An HTTP server that speaks as OpenAI's does, over one engine: ``roseinfer serve``."""
