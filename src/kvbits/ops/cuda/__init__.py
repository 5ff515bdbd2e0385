"""CUDA C++ compiled at first use: `compile` (NVRTC, disk cache, resource report) and `driver` (load, launch). No
kernels here.
"""
