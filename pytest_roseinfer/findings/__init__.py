"""What was found wrong: where, in words, as a picture, and as something to run again."""
