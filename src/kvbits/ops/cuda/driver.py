"""Load compiled kernels and launch them: the few calls of the CUDA driver that are needed, through ctypes.

A launch passes one struct by value and costs a few microseconds of host time; nothing here synchronises or allocates.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from .compile import Binary, KernelError

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_BYTES = {(8, 0): 166_912, (8, 7): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
"""Most shared memory of a block, by compute capability (CUDA programming guide, table of technical specifications)."""


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory one block can have; the smallest known for a capability this table does not name."""
    return SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))


def arch_of(capability: tuple[int, int]) -> str:
    """Compile target of a device: the plain one, since nothing here needs instructions of a single chip."""
    return f"sm_{capability[0]}{capability[1]}"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise KernelError(f"{what}: CUDA error {code} ({(text.value or b'?').decode()})")


class Kernel:
    """One kernel of a loaded binary, on the device current at birth.

    Args:
        shared_bytes: dynamic shared memory of every launch.
    """

    def __init__(self, binary: Binary, name: str, shared_bytes: int = 0) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        self.name, self.shared_bytes = name, shared_bytes
        self.module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self.module), binary.cubin), f"loading {name}")
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self.module, name.encode()), f"finding {name}")
        if shared_bytes > 48 << 10:
            _check(_driver().cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes), f"{name} with {shared_bytes} bytes of shared memory")

    def launch(self, grid: tuple[int, int, int], threads: int, args: ctypes.Structure, stream: int) -> None:
        """Start the kernel on a stream with `args` passed by value."""
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        code = _driver().cuLaunchKernel(self._function, *grid, threads, 1, 1, self.shared_bytes, ctypes.c_void_p(stream), params, None)
        if code:
            _check(code, f"launching {self.name} on {grid} blocks of {threads} threads")
