"""The names in an adapter class, and those that nothing asks for."""
