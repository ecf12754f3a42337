"""The bytes that a step's operations and kernels must move, beside the least possible."""
