"""What the closing kernels are told of a decode step: struct Step of step.cuh."""

import ctypes
from typing import Any

STEP_FIELDS: list[Any] = [
    ("closings", ctypes.c_void_p),
    ("closed", ctypes.c_void_p),
    ("tail", ctypes.c_void_p),
    ("runs", ctypes.c_void_p),
    ("fresh", ctypes.c_void_p * 2),
    ("fresh_stride", ctypes.c_int64 * 2 * 2),
    ("before", ctypes.c_void_p * 2),
    ("tail_head_bytes", ctypes.c_int64),
    ("tail_offset", ctypes.c_int * 2),
]
