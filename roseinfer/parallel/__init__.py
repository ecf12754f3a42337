"""What the other ranks do, and how they are started."""
