"""Tests of whole engines: a completion must not depend on the other requests in flight."""
