"""Kernels in CUDA C++: compiling, loading and launching them, and tensor maps of matrices."""
