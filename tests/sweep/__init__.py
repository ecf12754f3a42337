"""Every causal language model of transformers, tiny: the engine agrees with it, or refuses it."""
