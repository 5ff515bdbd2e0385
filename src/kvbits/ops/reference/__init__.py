"""Every op in plain PyTorch: the contract that kernels are tested against, in float64 if asked."""
