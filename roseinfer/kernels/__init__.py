"""Triton and CUDA kernels, and their launching."""
