"""Triton's interpreter, which runs kernels where there is no GPU, made faster while checks run."""
