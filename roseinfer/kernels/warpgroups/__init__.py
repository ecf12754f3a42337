"""Products by warpgroups, which GPUs of compute capability 9 have, in CUDA C++."""
