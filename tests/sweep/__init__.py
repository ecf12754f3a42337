"""Tiny models of every causal class of transformers, with which the engine agrees or refuses."""
