"""Schemas of OpenAI's API: request bodies, their validation, and responses."""
