"""Checking whole engines: what a request gets must not depend on what else is going on."""
