"""Texts that must be of a form: JSON, a schema, a regular expression, one of several words."""
