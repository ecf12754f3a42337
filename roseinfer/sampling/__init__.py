"""Choosing next tokens on the device."""
