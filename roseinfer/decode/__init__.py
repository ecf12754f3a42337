"""Decoding with the state on the device: one row per sequence."""
