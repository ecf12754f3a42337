"""Models of transformers, loaded and run on the paged cache."""
