"""How long an engine takes to start, and how much memory its model takes meanwhile."""
