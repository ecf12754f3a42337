"""What is wrong with a cache: where, in words, as a picture, and to run again."""
