"""Pages decoded from the words of docs/reference/formats.md alone, in plain numpy: an independent judge of what kernels
read and write.
"""

from __future__ import annotations

import numpy as np
import torch

from kvbits.spec import PageLayout, PerChannel, QuantSpec

SLOT_TOKENS = (0, 1, 4, 5, 2, 3, 6, 7)
NUMPY_DTYPES = {"float16": np.float16, "float32": np.float32}


def float_values(name: str) -> np.ndarray:
    """Return the value of every code of a float format, from its definition."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if name == "fp8_e4m3" else (5, 2, 15)
    codes = np.arange(256)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    return sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))


def numbers(raw: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values of stored bytes."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(NUMPY_DTYPES[dtype]).astype(np.float64)


def code_byte(kind: str, token: int, r: int, row_bytes: int, page_size: int) -> int:
    """Return where byte r of a token's row is stored."""
    if kind == "k":
        return ((token // 16) * (row_bytes // 4) + r // 4) * 64 + (token % 16) * 4 + r % 4
    slot = SLOT_TOKENS.index(token % 8)
    width = min(16, row_bytes - r // 16 * 16)
    return (r // 16) * 16 * page_size + ((token // 8) * 2 + slot // 4) * 4 * width + (r % 16) * 4 + slot % 4


def codes(struct: np.ndarray, layout: PageLayout, kind: str, spec: QuantSpec) -> np.ndarray:
    """[page_size, head_dim] codes of one head struct."""
    d = layout.dim(kind)
    out = np.zeros((layout.page_size, d), np.int64)
    for i, bits in enumerate(spec.number_format.planes):
        row_bytes = -(-d * bits // 32) * 4
        plane = struct[layout.sections[f"{kind}_plane{i}"].offset :]
        where = np.array(
            [
                [code_byte(kind, t, r, row_bytes, layout.page_size) for r in range(row_bytes)]
                for t in range(layout.page_size)
            ]
        )
        channel = np.arange(d)
        field = plane[where[:, channel % row_bytes]] >> (channel // row_bytes * bits) & (2**bits - 1)
        out = (out << bits) | field
    return out


def values(
    struct: np.ndarray, layout: PageLayout, kind: str, spec: QuantSpec, static: dict[str, torch.Tensor], head: int
) -> np.ndarray:
    """float64 [page_size, head_dim] of one head struct (uint8 [head_bytes])."""
    d, n = layout.dim(kind), layout.page_size

    def stored(name: str) -> np.ndarray | None:
        s = layout.sections.get(f"{kind}_{name}")
        if s is not None:
            return numbers(struct[s.offset : s.offset + s.nbytes].copy(), s.dtype).reshape(s.shape)
        return static[f"{kind}_{name}"][head].double().numpy() if f"{kind}_{name}" in static else None

    def spread(x: np.ndarray) -> np.ndarray:
        if isinstance(spec.granularity, PerChannel):
            return x[None, :]
        x = x.reshape(1, -1) if x.ndim == 1 else x.T
        return np.repeat(x, d // x.shape[1], axis=1)

    if spec.is_raw:
        return stored("raw")
    c = codes(struct, layout, kind, spec)
    x = float_values(spec.format)[c] if spec.number_format.kind == "float" else (c - spec.zero).astype(np.float64)
    x = np.broadcast_to(x * spread(stored("scale")), (n, d)).copy()
    if (bias := stored("bias")) is not None:
        x += spread(bias)
    if (mean := stored("mean")) is not None:
        x += mean[None, :]
    return x


def attention(call) -> tuple[np.ndarray, np.ndarray]:
    """float64 attention over the pages of a call, token by token: (out, lse)."""
    b, t, hq, _ = call.q.shape
    layout, o = call.stores[0].layout, call.options
    h, parts = layout.num_kv_heads, list(zip(call.stores, call.lists, strict=True))
    out, lse = np.zeros((b, t, hq, layout.value_head_dim)), np.full((b, t, hq), -np.inf)
    for row in range(b):
        for head in range(h):
            keys, vals, where = [], [], []
            for store, pages in parts:
                lay = store.layout
                for page, start, n in zip(*pages.of_sequence(row), strict=True):
                    struct = store.page(int(page))[head].numpy()
                    keys.append(values(struct, lay, "k", lay.key, store.static, head)[:n])
                    vals.append(values(struct, lay, "v", lay.value, store.static, head)[:n])
                    where.append(start + np.arange(n))
            if not keys:
                continue
            k, v, p = np.concatenate(keys), np.concatenate(vals), np.concatenate(where)
            for i in range(t):
                at = int(call.positions[row, i])
                seen = p <= at
                if o["sliding_window"] is not None:
                    seen &= p > at - o["sliding_window"]
                if not seen.any():
                    continue
                for g in range(head * hq // h, (head + 1) * hq // h):
                    s = k[seen] @ call.q[row, i, g].double().numpy() * o["scaling"]
                    if o["softcap"] is not None:
                        s = o["softcap"] * np.tanh(s / o["softcap"])
                    e = np.exp(s - s.max())
                    out[row, i, g] = e @ v[seen] / e.sum()
                    lse[row, i, g] = s.max() + np.log(e.sum())
    return out, lse
