"""Servers that somebody runs, held over HTTP to what they give a request alone."""
