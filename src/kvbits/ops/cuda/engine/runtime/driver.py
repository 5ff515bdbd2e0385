"""Loading and launching of compiled kernels: the few calls of the CUDA driver that are needed, through ctypes.

A launch passes one struct by value and costs a few microseconds of host time; nothing here synchronises or allocates.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from .....errors import KernelError
from .compile import Binary, Source, compile_source, missing

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SHARED_BYTES = {
    (8, 0): 166_912,
    (8, 7): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
"""Most shared memory of a block, by compute capability (CUDA programming guide, table of technical specifications)."""
MOST_SHARED = 96 << 10
"""Bytes of shared memory that a block can have on every GPU since compute capability 8.0."""


def shared_limit(capability: tuple[int, int]) -> int:
    """Return bytes of shared memory one block can have; the smallest known for a capability this table does
    not name.
    """
    return SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))


def refuses(device: torch.device, least: tuple[int, int] = (0, 0)) -> str | None:
    """Return why no kernel runs on a device, or none that needs the compute capability `least`; or None."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on a GPU"
    if torch.version.hip:
        return "the GPU is not an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < least:
        return f"the GPU is older than compute capability {least[0]}.{least[1]}"
    return missing()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise KernelError(f"{what}: CUDA error {code} ({(text.value or b'?').decode()})")


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream, without the object that torch makes around it."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *(
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Kernel:
    """One kernel of a loaded binary, on the device current at birth.

    Args:
        shared_bytes: dynamic shared memory of every launch.
        early: let a launch begin while the kernel ahead of it in the stream ends; the kernel calls
            `wait_for_previous_kernel` (Hopper and later).
    """

    def __init__(self, binary: Binary, name: str, shared_bytes: int = 0, *, early: bool = False) -> None:
        torch.cuda.current_stream()  # makes torch's context current
        self.name, self.shared_bytes = name, shared_bytes
        self.module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self.module), binary.cubin), f"loading {name}")
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(self._function), self.module, name.encode()), f"finding {name}"
        )
        if shared_bytes > 48 << 10:
            _check(
                _driver().cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes),
                f"{name} with {shared_bytes} bytes of shared memory",
            )

        self._attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._start = _driver().cuLaunchKernelEx
        self._num_attributes = int(early and torch.cuda.get_device_capability() >= (9, 0))

    def launch(
        self,
        grid: int | tuple[int, int],
        block: int | tuple[int, int],
        args: ctypes.Structure,
        stream: int,
        *,
        in_order: bool = False,
    ) -> None:
        """Start the kernel on a stream with `args` passed by value; grid and block in x, or in x and y.

        `in_order`: not before the kernel ahead has ended.
        """
        given = (self, grid, block, in_order)
        ready = args.__dict__.get("ready")
        # kept with the struct whose address it holds: decoding launches the same ones again and again
        if ready is None or ready[0] != given:
            x, y = (grid, 1) if isinstance(grid, int) else grid, (block, 1) if isinstance(block, int) else block
            config = _Config(
                *x,
                1,
                *y,
                1,
                self.shared_bytes,
                stream,
                ctypes.pointer(self._attribute),
                0 if in_order else self._num_attributes,
            )
            args.ready = ready = given, config, ctypes.byref(config), (ctypes.c_void_p * 1)(ctypes.addressof(args))
        ready[1].stream = stream
        code = self._start(ready[2], self._function, ready[3], None)
        if code:
            _check(code, f"launching {self.name} on {grid} blocks of {block} threads")


def load(
    source: Source, name: str, device_index: int, shared_bytes: int | None = None, *, early: bool = False
) -> Kernel:
    """Return the kernel `name` of a source, compiled for the GPU `device_index` and loaded there.

    Args:
        shared_bytes: as of `Kernel`; what the source's macros say if None.
        early: as of `Kernel`.
    """
    with torch.cuda.device(device_index):
        binary = compile_source(source, source.arch(torch.cuda.get_device_capability()))
        return Kernel(
            binary,
            name,
            int(source.macros.get("SHARED_BYTES", 0)) if shared_bytes is None else shared_bytes,
            early=early,
        )
