"""Models that run on kernels made for them."""
