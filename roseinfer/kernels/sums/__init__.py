"""Sums over several GPUs, inside of the kernels that need them."""
