"""Running cases, and the tests that are made of that."""
