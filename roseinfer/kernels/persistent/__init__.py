"""A whole decode step of one sequence as one kernel, in CUDA C++."""
