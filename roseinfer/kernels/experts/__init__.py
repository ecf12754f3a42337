"""Kernels of layers in which each token visits a few of many experts."""
