"""What is done to a cache: operations, histories of them, and how they are drawn."""
