"""What must hold after every operation."""
