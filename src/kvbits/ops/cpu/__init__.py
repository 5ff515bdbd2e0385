"""CPU kernels: a small C++ library (csrc/) with a plain C ABI, loaded by `library.py`."""
