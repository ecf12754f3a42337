"""The search for a case on which a check fails."""
