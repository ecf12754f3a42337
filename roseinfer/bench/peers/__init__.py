"""The same work on other systems, each set up as its own documentation has it, and side by side."""
