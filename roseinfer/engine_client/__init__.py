"""Clients of the engine for a server: in-process, or with the engine in a subprocess."""
