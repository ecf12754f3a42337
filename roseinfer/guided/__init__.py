"""Guided decoding: JSON, JSON schemas, regular expressions, choices and grammars."""
