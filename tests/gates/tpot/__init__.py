"""Times of decode steps, as another project takes them."""
