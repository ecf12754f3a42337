"""Kernels timed by themselves."""
