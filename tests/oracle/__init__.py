"""Tests of the oracle itself, against plain lists and its own counts."""
