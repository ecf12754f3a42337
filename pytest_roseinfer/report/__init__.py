"""The verdict, in the forms people and machines read."""
