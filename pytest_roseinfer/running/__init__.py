"""Running histories, and the tests that are made of that."""
