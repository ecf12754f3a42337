"""A decode step that takes longer than it did fails."""
