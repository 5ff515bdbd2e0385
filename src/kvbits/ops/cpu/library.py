"""Loader of libkvbits_cpu.so, and mirrors of its C structs (csrc/kvbits_cpu.h).

The library holds one set of kernels ("tier") per instruction set: amx, avx512 (VNNI), avx2, neon, generic. It takes the
best one that the machine can run; the environment variable KVBITS_CPU_TIER forces one, and KVBITS_CPU_LIBRARY names
another file. The tier amx leaves calls that tiles do not serve to avx512. amx_emulated runs the sources of amx in plain
C++ on every machine, many times slower: tests force it.

Calls of several threads run on torch's OpenMP threads: these spin for milliseconds after every torch op, so threads of
our own beside them would get half a core. With a torch without OpenMP, and in a forked child, calls run on one thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from ...errors import UnsupportedError

ABI_VERSION = 26
LIBRARY_NAME = "libkvbits_cpu.so"
TIERS = ("amx", "avx512", "avx2", "neon", "generic", "amx_emulated")
TILE_TIERS = ("amx", "amx_emulated")
VARIABLES = ("KVBITS_CPU_LIBRARY", "KVBITS_CPU_TIER")


class TensorStruct(Structure):
    """`kvbits_tensor`: how keys or values are stored in a page."""

    _fields_ = [
        ("format", c_int32),
        ("raw_dtype", c_int32),
        ("scale_dtype", c_int32),
        ("symmetric", c_int32),
        ("per_channel", c_int32),
        ("group_size", c_int32),
        ("plane_offset", c_int32 * 4),
        ("scale_offset", c_int32),
        ("bias_offset", c_int32),
        ("mean_offset", c_int32),
        ("static_scale", c_void_p),
        ("static_bias", c_void_p),
        ("hadamard", c_int32),
        ("fitted", c_int32),
        ("bands", c_void_p),
        ("from_basis", c_void_p),
        ("to_basis", c_void_p),
        ("offsets", c_void_p),
        ("inv_freq", c_void_p),
    ]


class StoreStruct(Structure):
    """`kvbits_store`: the pages of one layer in one pool."""

    _fields_ = [
        ("key", TensorStruct),
        ("value", TensorStruct),
        ("page_size", c_int32),
        ("num_slabs", c_int32),
        ("head_bytes", c_int64),
        ("page_stride", c_int64),
        ("slab_address", c_void_p),
        ("slab_pages", c_void_p),
    ]


class TableStruct(Structure):
    """`kvbits_table`: which pages each sequence reads."""

    _fields_ = [
        ("num_entries", c_int64),
        ("indptr", c_void_p),
        ("page_ids", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
    ]


class PartStruct(Structure):
    """`kvbits_part`."""

    _fields_ = [("store", c_void_p), ("table", c_void_p)]


class AttendStruct(Structure):
    """`kvbits_attend_call`."""

    _fields_ = [
        ("parts", c_void_p),
        ("num_parts", c_int32),
        ("batch", c_int32),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_head_dim", c_int32),
        ("q_dtype", c_int32),
        ("num_threads", c_int32),
        ("min_tile_rows", c_int32),
        ("one_term", c_int32),
        ("q", c_void_p),
        ("q_stride", c_int64 * 3),
        ("q_positions", c_void_p),
        ("scaling", c_float),
        ("softcap", c_float),
        ("sliding_window", c_int64),
        ("out", c_void_p),
        ("lse", c_void_p),
    ]


class CloseStruct(Structure):
    """`kvbits_close_call`."""

    _fields_ = [
        ("store", c_void_p),
        ("page_ids", c_void_p),
        ("num_pages", c_int64),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_head_dim", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("source", c_void_p * 2),
        ("stride", (c_int64 * 3) * 2),
        ("turn_starts", c_void_p),
        ("starts", c_void_p),
        ("status", c_int32 * 6),
    ]


class StoreCall(Structure):
    """`kvbits_store_call`; its two small arrays spelt out, which is a third faster to fill for every layer
    and token.
    """

    _fields_ = [
        ("store", c_void_p),
        ("slots", c_void_p),
        ("batch", c_int32),
        ("num_tokens", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_head_dim", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_row", c_int64),
        ("k_token", c_int64),
        ("k_head", c_int64),
        ("v_row", c_int64),
        ("v_token", c_int64),
        ("v_head", c_int64),
        ("used_bytes", c_int64),
        ("starts", c_void_p),
        ("frames", c_void_p),
        ("turn_starts", c_void_p),
        ("num_frames", c_int64),
        ("status", c_void_p),
    ]


class UnpackStruct(Structure):
    """`kvbits_unpack_call`."""

    _fields_ = [
        ("store", c_void_p),
        ("num_entries", c_int64),
        ("page_ids", c_void_p),
        ("starts", c_void_p),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_head_dim", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("to", c_void_p * 2),
        ("stride", (c_int64 * 2) * 2),
    ]


class PartialStruct(Structure):
    """`kvbits_partial`."""

    _fields_ = [
        ("out", c_void_p),
        ("lse", c_void_p),
        ("out_stride", c_int64 * 3),
        ("lse_stride", c_int64 * 3),
        ("dtype", c_int64),
    ]


class MergeStruct(Structure):
    """`kvbits_merge_call`."""

    _fields_ = [
        ("parts", c_void_p),
        ("num_parts", c_int32),
        ("batch", c_int32),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("out", c_void_p),
        ("out_stride", c_int64 * 3),
        ("lse", c_void_p),
    ]


def _candidates() -> list[Path]:
    if named := os.environ.get("KVBITS_CPU_LIBRARY"):
        return [Path(named)]
    # An editable install keeps the sources here and the built library in site-packages.
    installed = [Path(p) / "kvbits" / "ops" / "cpu" for p in sys.path if p]
    return [folder / LIBRARY_NAME for folder in [Path(__file__).parent, *installed]]


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """Return (library, "") or (None, why not)."""
    candidates = _candidates()
    path = next((p for p in candidates if p.is_file()), None)
    if path is None and os.environ.get("KVBITS_CPU_LIBRARY"):
        return None, f"KVBITS_CPU_LIBRARY={str(candidates[0])!r} is not a file"
    if path is None:
        return (
            None,
            (
                "the CPU library was not built (no C++ compiler at install time?); reinstall with GCC or Clang present,"
                " or use a wheel"
            ),
        )
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} cannot be loaded: {error}"
    lib.kvbits_abi_version.restype = c_int32
    if (version := lib.kvbits_abi_version()) != ABI_VERSION:
        return None, f"{path} has ABI version {version}, this package needs {ABI_VERSION}; rebuild it"
    lib.kvbits_tier.restype = c_char_p
    lib.kvbits_set_tier.argtypes = [c_char_p]
    lib.kvbits_error.restype = c_char_p
    lib.kvbits_error.argtypes = [c_int32]
    lib.kvbits_amx_refusal.restype = c_char_p
    lib.kvbits_attend_refusal.restype = c_char_p
    lib.kvbits_attend_refusal.argtypes = [POINTER(AttendStruct), POINTER(c_char_p)]
    lib.kvbits_use_openmp.argtypes = [c_void_p]
    lib.kvbits_attend.argtypes = [POINTER(AttendStruct)]
    lib.kvbits_close.argtypes = [POINTER(CloseStruct)]
    lib.kvbits_store_tokens.argtypes = [POINTER(StoreCall)]
    lib.kvbits_unpack.argtypes = [POINTER(UnpackStruct)]
    lib.kvbits_merge.argtypes = [POINTER(MergeStruct)]
    if not lib.kvbits_tier():
        wanted = os.environ.get("KVBITS_CPU_TIER")
        return (
            None,
            f"KVBITS_CPU_TIER={wanted!r} is not a tier that this machine and build can run; known: {', '.join(TIERS)}",
        )
    lib.kvbits_use_openmp(openmp_parallel())
    return lib, ""


def openmp_parallel() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch is linked to, or None."""
    found = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    try:
        # symbols of its dependencies too, whatever they are called
        linked = ctypes.CDLL(str(found), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(linked.GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None


def unavailable() -> str | None:
    """Return why there are no CPU kernels here, or None when there are.

    Raises:
        UnsupportedError: there are none, and a variable asks for some; everything would take the reference, many times
            slower.
    """
    why = _open()[1]
    if why and (asking := [name for name in VARIABLES if os.environ.get(name)]):
        raise UnsupportedError(f"{why}; unset {' and '.join(asking)} to take what is there")
    return why or None


def library() -> ctypes.CDLL:
    """Return the loaded library.

    Raises:
        UnsupportedError: it was not built, cannot be loaded, or KVBITS_CPU_TIER names a tier that cannot run here.
    """
    lib, reason = _open()
    if lib is None:
        raise UnsupportedError(reason)
    return lib


def tier() -> str:
    """Return the name of the instruction set in use."""
    return library().kvbits_tier().decode()


def set_tier(name: str) -> None:
    """Switch to another instruction set, for tests and benchmarks.

    Raises:
        UnsupportedError: this machine or build cannot run it.
    """
    if library().kvbits_set_tier(name.encode()):
        raise UnsupportedError(
            f"tier {name!r} cannot run on this machine or is not in this build; known: {', '.join(TIERS)}"
        )


def amx_refusal() -> str | None:
    """Return why this machine attends in no tiles of AMX, or None where it does."""
    found = library().kvbits_amx_refusal()
    return found.decode() if found else None


def check(code: int) -> None:
    """Turn a return code of the library into an exception."""
    if code:
        raise UnsupportedError(f"CPU kernels: {library().kvbits_error(code).decode()}")
