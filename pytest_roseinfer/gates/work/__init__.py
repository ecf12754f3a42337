"""A decode step that does more work than it did fails."""
