"""Base classes for the adapters that users write, and their validation."""
