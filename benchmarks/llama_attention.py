"""llama.cpp's CPU flash attention as a peer, through ctypes on ggml's own libraries.

They come with llama-cpp-python (`pip install llama-cpp-python` compiles them for this machine), or from a build of
llama.cpp whose folder is named.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # enum ggml_type
# relative L2 error against float64 on the values before quantization; f16 sums its outputs in 16 bits
NOISE = {"f16": 0.1, "q8_0": 3e-2, "q4_0": 0.5}


class _InitParams(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", ctypes.c_bool)]


class _Plan(Structure):
    """`ggml_cplan`; room at the end for fields that later versions add."""

    _fields_ = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("rest", c_char * 128),
    ]


class Library:
    """libggml-base and libggml-cpu of one folder."""

    def __init__(self, folder: Path) -> None:
        self.base, self.cpu = (
            ctypes.CDLL(str(next(folder.glob(f"libggml-{n}*.so"))), mode=ctypes.RTLD_GLOBAL) for n in ("base", "cpu")
        )
        for name, result, arguments in (
            ("ggml_init", c_void_p, [_InitParams]),
            ("ggml_new_tensor_4d", c_void_p, [c_void_p, c_int] + [c_int64] * 4),
            ("ggml_view_4d", c_void_p, [c_void_p, c_void_p] + [c_int64] * 4 + [c_size_t] * 4),
            ("ggml_get_data", c_void_p, [c_void_p]),
            ("ggml_row_size", c_size_t, [c_int, c_int64]),
            ("ggml_flash_attn_ext", c_void_p, [c_void_p] * 5 + [c_float] * 3),
            ("ggml_new_graph", c_void_p, [c_void_p]),
            ("ggml_build_forward_expand", None, [c_void_p, c_void_p]),
            ("ggml_quantize_chunk", c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
        ):
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_cpu_init()
        self.cpu.ggml_graph_plan.restype, self.cpu.ggml_graph_plan.argtypes = _Plan, [c_void_p, c_int, c_void_p]
        self.cpu.ggml_graph_compute.restype, self.cpu.ggml_graph_compute.argtypes = c_int, [c_void_p, POINTER(_Plan)]


def find(folder: Path | None) -> tuple[Library | None, str]:
    """Find the library: return (library, "") or (None, why there is none)."""
    if folder is None:
        found = importlib.util.find_spec("llama_cpp")
        if found is None or found.origin is None:
            return None, "llama-cpp-python is not installed and no folder with libggml-cpu.so was named (--ggml)"
        folder = Path(found.origin).parent / "lib"
    try:
        return Library(folder), ""
    except StopIteration:
        return None, f"no libggml-base.so and libggml-cpu.so in {folder}"
    except (OSError, AttributeError) as error:
        return None, f"ggml of {folder} cannot be used: {error}"


def candidate(
    lib: Library, kind: str, contiguous: bool, hq: int, h: int, d: int, tokens: int, layers: int, threads: int
) -> tuple[Callable[[int], object], int]:
    """Return (decode over layer i, bytes of one layer), checked on layer 0.

    K and V lie as in llama.cpp's cache, one row of all kv heads per token, or `contiguous` per head.
    """
    base, number = lib.base, TYPES[kind]
    row = base.ggml_row_size(number, d)
    nbytes = 2 * row * h * tokens
    strides = (row, row * tokens) if contiguous else (row * h, row)  # of a token, of a head
    q = torch.randn(hq, d)
    small = torch.randn(2, 256 * h, d)
    runs = []
    for _ in range(layers):
        context = base.ggml_init(_InitParams(nbytes + (8 << 20), None, False))
        sides = []
        for x, halves in zip(small, small.half(), strict=True):
            stored = base.ggml_new_tensor_4d(context, number, d, tokens * h, 1, 1)
            data = base.ggml_get_data(stored)
            for first in range(0, tokens * h, len(x)):
                n = min(len(x), tokens * h - first)
                if kind == "f16":
                    ctypes.memmove(data + first * row, halves.data_ptr(), n * row)
                else:
                    base.ggml_quantize_chunk(number, x.data_ptr(), data + first * row, 0, n, d, None)
            sides.append(base.ggml_view_4d(context, stored, d, tokens, h, 1, *strides, nbytes // 2, 0))
        queries = base.ggml_new_tensor_4d(context, 0, d, 1, hq, 1)
        ctypes.memmove(base.ggml_get_data(queries), q.data_ptr(), q.nbytes)
        out = base.ggml_flash_attn_ext(context, queries, *sides, None, d**-0.5, 0.0, 0.0)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, out)
        plan = lib.cpu.ggml_graph_plan(graph, threads, None)
        work = torch.empty(plan.work_size + 64, dtype=torch.uint8)
        plan.work_data = work.data_ptr()
        runs.append((graph, plan, work, out))

    def run(i: int) -> None:
        graph, plan, _, _ = runs[i % layers]
        lib.cpu.ggml_graph_compute(graph, plan)

    run(0)
    got = torch.empty(hq, d)
    ctypes.memmove(got.data_ptr(), base.ggml_get_data(runs[0][3]), got.nbytes)
    rows = small.double().repeat(1, -(-tokens * h // small.shape[1]), 1)[:, : tokens * h]
    k, v = rows.view(2, h, tokens, d) if contiguous else rows.view(2, tokens, h, d).transpose(1, 2)
    p = torch.softmax(q.double().view(h, hq // h, d) @ k.transpose(1, 2) * d**-0.5, -1)
    want = (p @ v).view(hq, d)
    error = float((got - want).norm() / want.norm())
    assert error < NOISE[kind], f"llama.cpp {kind}: relative L2 error {error:.2e}"
    return run, nbytes
