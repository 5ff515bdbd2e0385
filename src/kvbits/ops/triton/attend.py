"""Attention over packed and 16-bit pages in Triton: the portable GPU path, and the readable version of what the CUDA kernels do.

A program takes one (sequence, kv head, block of query columns) and a run of its pages, dequantizes a few tokens at a time in registers and keeps an online
softmax in float32. Runs of one sequence are merged at the end. No attempt is made at the memory limit: codes are gathered byte by byte, which any GPU and
the interpreter on a CPU can do; ops/cuda/attend is the fast path where it runs.
"""

# mypy: disallow-untyped-defs=False
# (a kernel's parameters have no Python types)

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import DataError
from ...spec import VALUE_TOKEN_ORDER, PageLayout
from ..cuda.side import widened
from ..descriptor import DTYPES, GROUP, LEVELS, STATIC, describe
from ..types import AttendCall, Part, banded_sides, check_call, kvquant_extras, last_positions

BLOCK_TOKENS = (64, 32, 16)
"""Tokens dequantized at a time: the first that divides a page."""
BLOCK_COLUMNS = 16
PROGRAMS = 512
"""Programs a launch aims at: a few per multiprocessor of any current GPU."""

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    INTEGER, RAW = tl.constexpr(LEVELS["int"]), tl.constexpr(LEVELS["raw"])
    SCALE_STATIC, SCALE_GROUP = tl.constexpr(STATIC), tl.constexpr(GROUP)
    FLOAT16, BFLOAT16, FLOAT8 = (tl.constexpr(DTYPES[name]) for name in ("float16", "bfloat16", "float8_e4m3"))
else:  # the module can be imported everywhere; `refuses` says what is missing
    triton = None

PRECISION = "ieee" if torch.version.hip else "tf32"
"""Of matrix products: 10 bits of mantissa with float32's range, finer than the 16-bit queries; other GPUs than NVIDIA's may have no such mode."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def refuses(q: torch.Tensor, call: AttendCall) -> str | None:
    """Why this backend does not take a call, or None. q: [B, T, Hq, D]."""
    if triton is None:
        return "Triton is not installed; pip install triton"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {q.device.type}"
    if call.page_lse is not None:
        return "log-sum-exps by page have no Triton kernel"
    for part in call.parts:
        layout = part.store.layout
        if part.low:
            return "low planes have no Triton kernel yet"
        if banded := banded_sides(layout):
            return f"{banded} have no Triton kernel"
        if extras := kvquant_extras(layout):
            return f"{extras} have no Triton kernel"
        if layout.key.is_raw != layout.value.is_raw:
            return "one of keys and values is raw and the other is not"
        if layout.page_size % BLOCK_TOKENS[-1] and not layout.key.is_raw:
            return f"page_size={layout.page_size} is no multiple of {BLOCK_TOKENS[-1]}"
    return None


if triton is not None:

    @triton.jit
    def _codes(base, token, channel, PAGE: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, mask):
        """Codes of one bit plane at [token, channel]: docs/formats.md, "Codes"."""
        r = channel % ROW
        if VALUES:
            width = tl.minimum(16, ROW - r // 16 * 16)
            in_eight = token % 8
            slot = tl.where((in_eight == 2) | (in_eight == 3), in_eight + 2, tl.where((in_eight == 4) | (in_eight == 5), in_eight - 2, in_eight))
            at = r // 16 * 16 * PAGE + (token // 8 * 2 + slot // 4) * 4 * width + r % 16 * 4 + slot % 4
        else:
            at = (token // 16 * (ROW // 4) + r // 4) * 64 + token % 16 * 4 + r % 4
        byte = tl.load(base + at, mask=mask, other=0).to(tl.int32)
        return (byte >> (channel // ROW * BITS)) & ((1 << BITS) - 1)

    @triton.jit
    def _float(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
        """Value of the code of a float with that many bits: sign, exponent, mantissa, the least exponent for subnormal numbers."""
        exponent = (code & ((1 << (EXPONENT + MANTISSA)) - 1)) >> MANTISSA
        fraction = (code & ((1 << MANTISSA) - 1)).to(tl.float32)
        scale = tl.exp2((tl.maximum(exponent, 1) - ((1 << (EXPONENT - 1)) - 1) - MANTISSA).to(tl.float32))
        value = (fraction + tl.where(exponent > 0, 1 << MANTISSA, 0).to(tl.float32)) * scale
        return tl.where(code >= (1 << (EXPONENT + MANTISSA)), -value, value)

    @triton.jit
    def _section(base, index, TYPE: tl.constexpr, mask):
        """Numbers of a scale, bias or mean section as float32."""
        if TYPE == FLOAT16:
            return tl.load(base.to(tl.pointer_type(tl.float16)) + index, mask=mask, other=0).to(tl.float32)
        elif TYPE == FLOAT8:
            return _float(tl.load(base + index, mask=mask, other=0).to(tl.int32), 4, 3)
        elif TYPE == BFLOAT16:
            return tl.load(base.to(tl.pointer_type(tl.bfloat16)) + index, mask=mask, other=0).to(tl.float32)
        else:
            return tl.load(base.to(tl.pointer_type(tl.float32)) + index, mask=mask, other=0)

    @triton.jit
    def _dequantized(page, static_scale, static_bias, head, token, channel, mask, S: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr):
        """Dequantized [token, channel] of a page: (code - zero) * scale + bias + mean."""
        KIND_OF_LEVELS: tl.constexpr = S[0]
        ROW0: tl.constexpr = S[1]
        BITS0: tl.constexpr = S[2]
        ROW1: tl.constexpr = S[3]
        BITS1: tl.constexpr = S[4]
        KIND: tl.constexpr = S[5]
        SIZE: tl.constexpr = S[6]
        ZERO: tl.constexpr = S[7]
        HAS_BIAS: tl.constexpr = S[8]
        HAS_MEAN: tl.constexpr = S[9]
        TYPE: tl.constexpr = S[10]
        code = _codes(page + S[11], token, channel, PAGE, ROW0, BITS0, VALUES, mask)
        if BITS1 > 0:
            code = code * (1 << BITS1) + _codes(page + S[12], token, channel, PAGE, ROW1, BITS1, VALUES, mask)
        if KIND_OF_LEVELS == INTEGER:
            x = (code - ZERO).to(tl.float32)
        else:
            x = _float(code, S[16], S[17])
        if KIND == SCALE_STATIC:
            x = x * tl.load(static_scale + head * D + channel, mask=mask, other=0)
            if HAS_BIAS:
                x += tl.load(static_bias + head * D + channel, mask=mask, other=0)
        else:
            if KIND == SCALE_GROUP:
                index = channel // SIZE * PAGE + token
            else:
                index = channel + token * 0
            x = x * _section(page + S[13], index, TYPE, mask)
            if TYPE == FLOAT8:
                x = x * tl.load((page + S[18]).to(tl.pointer_type(tl.float32)))
            if HAS_BIAS:
                x += _section(page + S[14], index, TYPE, mask)
        if HAS_MEAN:
            x += _section(page + S[15], channel + token * 0, TYPE, mask)
        return x

    @triton.jit
    def _values(page, static_scale, static_bias, head, token, channel, mask, S: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, VALUES: tl.constexpr):
        """[token, channel] of a page as float32."""
        if S[0] == RAW:
            return _section(page + S[11], token * D + channel, S[10], mask)
        else:  # not after the `if`: the compiler goes through what follows a return in a branch
            return _dequantized(page, static_scale, static_bias, head, token, channel, mask, S, PAGE, D, VALUES)

    @triton.jit
    def _attend(
        q, out, ml, positions, run_first, run_count, pool, page_offset, page_start, page_length, k_scale, k_bias, v_scale, v_bias, scaling, softcap, window,
        num_queries, group, head_bytes, layer_offset,
        H: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
        RUNS: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One run of pages for one (sequence, kv head, column block). q: [B, T, Hq, D] dense; out: [programs, COLUMNS, D], ml: [programs, COLUMNS, 2]."""
        program = tl.program_id(0).to(tl.int64)
        run, block = program % RUNS, program // RUNS % COLUMN_BLOCKS
        head, b = program // (RUNS * COLUMN_BLOCKS) % H, program // (RUNS * COLUMN_BLOCKS * H)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        valid = column < num_queries * group
        row = (b * num_queries + column // group) * (H * group) + head * group + column % group
        channel = tl.arange(0, D_PADDED)
        queries = tl.load(q + row[:, None] * D + channel[None, :], mask=valid[:, None] & (channel[None, :] < D), other=0).to(tl.float32) * scaling
        last = tl.load(positions + b * num_queries + column // group, mask=valid, other=-1)
        best = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        sums = tl.zeros([COLUMNS, D_PADDED], tl.float32)
        first = tl.load(run_first + b * RUNS + run)
        entry, end = first, first + tl.load(run_count + b * RUNS + run)
        while entry < end:  # `while`, not `for`: the interpreter cannot take a loop's bounds from memory with NumPy 2.4
            page = pool + tl.load(page_offset + entry) + layer_offset + head * head_bytes
            start, length = tl.load(page_start + entry), tl.load(page_length + entry)
            t = start * 0
            while t < length:
                token = t + tl.arange(0, TOKENS)
                there = (token[:, None] < length) & (channel[None, :] < D)
                k = _values(page, k_scale, k_bias, head, token[:, None], channel[None, :], there, KEY, PAGE, D, False)
                k = tl.where(there, k, 0.0)  # bytes past the visible length may decode to NaN
                s = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
                if SOFTCAP:
                    e = tl.exp(2.0 * s / softcap)
                    s = softcap * tl.where(e > 1e30, 1.0, (e - 1.0) / (e + 1.0))
                at = (start + token)[None, :]
                seen = (token[None, :] < length) & (at <= last[:, None]) & (at > last[:, None] - window)
                s = tl.where(seen, s, float("-inf"))
                top = tl.maximum(best, tl.max(s, 1))
                safe = tl.where(top == float("-inf"), 0.0, top)
                p = tl.exp(s - safe[:, None])
                keep = tl.exp(best - safe)
                v = _values(page, v_scale, v_bias, head, token[:, None], channel[None, :], there, VALUE, PAGE, D, True)
                v = tl.where(there, v, 0.0)
                sums = sums * keep[:, None] + tl.dot(p, v, input_precision=PRECISION)
                total = total * keep + tl.sum(p, 1)
                best = top
                t += TOKENS
            entry += 1
        slot = program * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(out + slot[:, None] * D + channel[None, :], sums, mask=channel[None, :] < D)
        tl.store(ml + slot * 2, best)
        tl.store(ml + slot * 2 + 1, total)


def _constants(layout: PageLayout, kind: str) -> tuple[int, ...]:
    """Keys ("k") or values ("v") as compile-time constants, in the order `_values` reads them."""
    side = describe(layout, kind)
    (bits0, row0, offset0), (bits1, row1, offset1) = side.plane(0), side.plane(1)
    return (
        side.levels, row0, bits0, row1, bits1, side.scale, side.group, side.zero, int(side.has_bias), int(side.has_mean),
        side.dtype if side.is_raw else side.scale_dtype, side.plane_offset[0] if side.is_raw else offset0, offset1,
        *(x or 0 for x in (side.scale_offset, side.bias_offset, side.mean_offset)), side.exponent_bits, side.mantissa_bits,
        side.page_scale_offset or 0,
    )  # fmt: skip


class Plan:
    """A step over fixed page tables, ready to run for every layer of the group; the contract of the CUDA plan.

    Tables are uploaded and buffers allocated here; `run` launches and merges with a few torch operations, so a CUDA graph can hold it.

    Args:
        call, num_q_heads, q_dtype, num_queries, layer_strides: as in `cuda.Plan`.

    Attributes:
        q_positions: int64 [B, num_queries] on the device: by default the last positions of every sequence.
    """

    def __init__(
        self, call: AttendCall, num_q_heads: int, q_dtype: torch.dtype, device: torch.device, *, num_queries: int = 1,
        layer_strides: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        assert VALUE_TOKEN_ORDER == (0, 1, 4, 5, 2, 3, 6, 7), "_codes spells this order out"
        layout = call.parts[0].store.layout
        check_call(call, (len(call.parts[0].table.indptr) - 1, num_queries, num_q_heads, layout.head_dim))
        self.call, self.device = call, device
        self.shape = (len(call.parts[0].table.indptr) - 1, num_queries, num_q_heads, layout.head_dim)
        self.strides = layer_strides or (0,) * len(call.parts)
        self.q_positions = torch.from_numpy(last_positions(call, self.shape[0], num_queries).astype(np.int64)).to(device)
        self._launches = [_launch(call, part, self.shape, device) for part in call.parts]

    def run(
        self, q: torch.Tensor, q_positions: torch.Tensor | None = None, *, layer: int = 0, static: Sequence[Mapping[str, torch.Tensor]] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, T, Hq, D] in q's dtype, lse float32 [B, T, Hq]) over the planned pages of `layer`; static: as of `cuda.Plan.run`."""
        if tuple(q.shape) != self.shape:
            raise DataError(f"q is {tuple(q.shape)}; the plan is for {self.shape}")
        if q_positions is not None:
            self.q_positions.copy_(q_positions)
        q = q.contiguous()
        shared = [p.store.static for p in self.call.parts] if static is None else static
        for part, (programs, arguments), stride, own in zip(self.call.parts, self._launches, self.strides, shared, strict=True):
            arguments |= {name: _static(part, own, name, self.device) for name in ("k_scale", "k_bias", "v_scale", "v_bias")}
            _attend[(programs,)](q=q, positions=self.q_positions, layer_offset=layer * stride, **arguments)
        sums, ml = (torch.cat([a[name] for _, a in self._launches], dim=3) for name in ("out", "ml"))  # [B, H, column blocks, runs, columns, ..]
        best = ml[..., 0].amax(3, keepdim=True)
        weights = torch.where(torch.isinf(ml[..., 0]), 0.0, torch.exp(ml[..., 0] - torch.where(torch.isinf(best), 0.0, best)))
        total = (weights * ml[..., 1]).sum(3)
        out = (weights[..., None] * sums).sum(3) / torch.where(total > 0, total, 1.0)[..., None]
        lse = torch.where(total > 0, best[:, :, :, 0] + torch.log(total), -torch.inf)
        b, t, hq, d = self.shape
        h = self.call.parts[0].store.layout.num_kv_heads
        out, lse = out.flatten(2, 3)[:, :, : t * hq // h], lse.flatten(2, 3)[:, :, : t * hq // h]
        return (
            out.view(b, h, t, hq // h, d).permute(0, 2, 1, 3, 4).reshape(b, t, hq, d).to(q.dtype),
            lse.view(b, h, t, hq // h).permute(0, 2, 1, 3).reshape(b, t, hq),
        )


def plan(call: AttendCall, num_q_heads: int, q_dtype: torch.dtype, device: torch.device, *, history_only: bool = False, **options: Any) -> Plan:
    """A `Plan`; see there. It masks by position, so `history_only` changes nothing."""
    return Plan(call, num_q_heads, q_dtype, device, **options)


def attend(q: torch.Tensor, call: AttendCall, q_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run once: out [B, T, Hq, D] in q's dtype and lse [B, T, Hq] float32; the contract of the reference."""
    return Plan(call, q.shape[2], q.dtype, q.device, num_queries=q.shape[1]).run(q, q_positions)


def _launch(call: AttendCall, part: Part, shape: tuple[int, ...], device: torch.device) -> tuple[int, dict[str, Any]]:
    """(programs, arguments of `_attend` but queries and layer) for one part; its `out` is [B, H, column blocks, runs, COLUMNS, D], its `ml` [.., 2]."""
    layout, table = part.store.layout, part.table
    b, t, hq, d = shape
    h = layout.num_kv_heads
    blocks = -(-t * hq // h // BLOCK_COLUMNS)
    pages = np.diff(table.indptr)
    runs = int(max(1, min(pages.max(initial=0), PROGRAMS // max(1, b * h * blocks))))
    cuts = table.indptr[:-1, None] + pages[:, None] * np.arange(runs + 1) // runs
    base = part.store.slabs[0]
    offsets = part.store.addresses()[table.page_ids] - base.data_ptr()
    host = {
        "run_first": cuts[:, :-1], "run_count": np.diff(cuts, axis=1), "page_offset": offsets, "page_start": table.starts, "page_length": table.lengths,
    }  # fmt: skip
    tables = {name: torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device) for name, x in host.items()}
    sums = torch.empty(b, h, blocks, runs, BLOCK_COLUMNS, d, device=device)
    ml = torch.empty(b, h, blocks, runs, BLOCK_COLUMNS, 2, device=device)
    sides = {"KEY": _constants(layout, "k"), "VALUE": _constants(layout, "v")}
    options: dict[str, Any] = {
        "scaling": call.scaling, "softcap": call.softcap or 1.0, "window": call.sliding_window or 2**40, "num_queries": t, "group": hq // h,
        "head_bytes": layout.head_bytes, "H": h, "D": d, "D_PADDED": max(16, triton.next_power_of_2(d)), "PAGE": layout.page_size, "RUNS": runs,
        "COLUMN_BLOCKS": blocks, "TOKENS": next((n for n in BLOCK_TOKENS if layout.page_size % n == 0), BLOCK_TOKENS[-1]),
        "COLUMNS": BLOCK_COLUMNS, "SOFTCAP": call.softcap is not None, "PRECISION": PRECISION,
    }  # fmt: skip
    return b * h * blocks * runs, {"out": sums, "ml": ml, "pool": base, **tables, **options, **sides}


def _static(part: Part, static: Mapping[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor:
    """Calibrated [H, groups or channels] spread to [H, head_dim]; a placeholder where the spec has none."""
    x = static.get(name)
    return _nothing(device) if x is None else widened(x, part.store.layout.head_dim, device)


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, device=device)
