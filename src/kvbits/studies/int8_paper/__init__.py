"""The INT8 paper's matrix operations: a float32 matrix [rows, columns] to int8 with one scale per column, and back.

    scale[d] = max_t |x[t, d]| / 127        q = clamp(round(x / scale), -127, 127)        x' = q * scale

`reference.py` is plain PyTorch, `cpu.py` the production kernel and the paper's scalar baseline in both loop orders. A column of zeros has scale 1.
"""
