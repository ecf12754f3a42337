"""Gates: a decode step that does more work fails, and nothing else does."""
