"""Every Triton kernel, and how they are launched."""
