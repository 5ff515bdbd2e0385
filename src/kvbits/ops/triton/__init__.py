"""Attention in Triton, for GPUs that the CUDA kernels do not serve."""
