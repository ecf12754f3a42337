"""SGLang's caches, and what it takes to drive them without its server."""
