"""Verdict on a run, for people and for programs."""
