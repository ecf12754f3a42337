"""Decoding with the state on the device: one row for each sequence that decodes."""
