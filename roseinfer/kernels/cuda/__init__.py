"""What kernels in CUDA C++ need: compiling, loading and launching them, and maps of matrices."""
