"""Kernels that do several of a model's small operations at once, and the models run on them."""
