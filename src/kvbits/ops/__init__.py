"""One folder per operation: the contract and plain-PyTorch reference first, kernels beside it."""
