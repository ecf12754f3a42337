"""Sampling of next tokens on the device."""
