"""KVQuant's fused CUDA kernels (arXiv:2401.18079): codebooks, outliers, keys before the rotary embedding."""
