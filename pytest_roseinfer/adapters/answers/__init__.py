"""What an adapter answers where it is asked."""
