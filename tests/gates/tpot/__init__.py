"""Times of decode steps in a user's project."""
