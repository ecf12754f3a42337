"""The tutorials and examples of the documentation, which must hold."""
