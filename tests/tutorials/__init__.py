"""What a newcomer reads and does in the first minutes, kept true."""
