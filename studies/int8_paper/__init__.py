"""The INT8 paper (December 2025): a float32 matrix [rows, columns] to int8 with one scale per column, and back.

    scale[d] = max_t |x[t, d]| / 127        q = clamp(round(x / scale), -127, 127)        x' = q * scale

`reference.py` is plain PyTorch, `cpu.py` the production kernel and the paper's scalar baseline in both loop orders,
`cuda.py` the paper's four kernels and ours, `study.py` what `python -m studies paper` measures, `figures.py` its
figures. The C++ of `csrc/` is a library of its own (studies/CMakeLists.txt). A column of zeros has scale 1.
"""
