"""Gates fail a run: because a step does more work, or because it takes longer."""
