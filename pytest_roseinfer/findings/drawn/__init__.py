"""What was found, drawn step by step."""
