"""Attention over a preset's pages beside torch's own over 16-bit keys and values, on any machine: `kvbits bench`.

Every preset is checked against the float64 reference on its own pages first; one that is wrong has no speed. Candidates
take turns round by round and times are medians, so that a machine that changes its clock changes it for all. Each call
reads another layer, of `ROTATE_BYTES` together, so that pages come from memory. Queries see all tokens: of a decoding
step one a sequence, of a chunk many behind its history. Torch gets query heads that share keys as rows of one head,
which is its fastest form, in each dtype and by each of its kernels; ratios are over the fastest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import schemes
from ..cache.pool import allocate_slab
from ..errors import DataError
from ..ops import dispatch
from ..ops.attend import plan
from ..ops.reference.attend import exact
from ..ops.types import PageStore, Table
from ..quant.basis import completed
from ..quant.scales import steps
from ..spec import PageLayout

ROTATE_BYTES = {"cpu": 130_000_000, "cuda": 400_000_000}
MOST_ERROR = {"cpu": 2e-2, "cuda": 1e-2}
"""Relative L2 against float64; integer products on CPUs round queries and weights to 8 bits where codes have few."""
MOST_SECONDS, LEAST_ROUNDS = 60.0, 3
"""After so many seconds of a shape no further round begins, once there were so many."""
CLOSED_AT_ONCE = 256
"""Pages of random numbers that are quantized; longer caches repeat them."""


@dataclass(frozen=True)
class Shape:
    """Shape of a timed attention: `queries` new tokens of each of `batch` sequences. Each new token sees `tokens`."""

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    queries: int

    def __str__(self) -> str:
        what = "decode" if self.queries == 1 else f"chunk of {self.queries}"
        return (
            f"{what}, {self.batch} x {self.tokens:,} tokens, {self.query_heads}/{self.kv_heads} heads of"
            f" {self.head_dim}"
        )


@dataclass(frozen=True)
class Candidate:
    """Attention that is timed: `run(turn)` reads layer `turn % layers`, of `nbytes` bytes."""

    name: str
    run: Callable[[int], Any]
    layers: int
    nbytes: int
    error: float
    backend: str


def made_up(layout: PageLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors that calibration would bring for normal numbers: ranges, codebooks of even quantiles, random
    bases, rotary frequencies.
    """
    static: dict[str, torch.Tensor] = {}
    h, d = layout.num_kv_heads, layout.head_dim
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if spec.static:
            static |= {
                f"{kind}_scale": torch.full((h, d), 2.6) + torch.rand(h, d) / 5,
                f"{kind}_bias": torch.randn(h, d) / 100,
            }
        if spec.has_codebook:
            levels = torch.erfinv(torch.linspace(-0.97, 0.97, 2**spec.bits))
            static[f"{kind}_codebook"] = (levels / levels.max()).expand(h, -1).contiguous()
        if spec.basis == "calibrated":
            static[f"{kind}_basis"] = torch.linalg.qr(torch.randn(h, d, d)).Q / steps(spec, d)
            static[f"{kind}_mean"] = torch.zeros(h, 2, d)
        if spec.needs_rotary:
            static = completed(static, 10_000.0 ** (-torch.arange(d // 2) / (d // 2)))
    return {name: x.to(device) for name, x in static.items()}


def packed(name: str, shape: Shape, device: torch.device) -> Candidate:
    """Return attention over a preset's pages, checked on layer 0.

    Raises:
        DataError: its numbers are wrong.
        UnsupportedError: no backend serves it.
    """
    scheme = schemes.get(name, head_dim=shape.head_dim)
    layout = PageLayout(
        key=scheme.key,
        value=scheme.value,
        page_size=scheme.page_size,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    per = shape.tokens // scheme.page_size
    pages, static = per * shape.batch, made_up(layout, device)
    nbytes = pages * layout.page_size_bytes
    layers = -(-ROTATE_BYTES[device.type] // nbytes) + 1
    slab = allocate_slab(layers * nbytes, device)[: layers * nbytes].view(
        layers, pages, shape.kv_heads, layout.head_bytes
    )
    store = PageStore(layout, (slab[0],), static)
    k, v = (
        torch.randn(
            CLOSED_AT_ONCE, shape.kv_heads, scheme.page_size, shape.head_dim, device=device, dtype=torch.bfloat16
        )
        for _ in "kv"
    )
    closing = dispatch.choose("close", k, store)
    for first in range(0, pages, CLOSED_AT_ONCE):
        ids = np.random.permutation(np.arange(first, min(first + CLOSED_AT_ONCE, pages)))
        closing.run(k[: len(ids)], v[: len(ids)], store, ids, starts=ids % per * scheme.page_size)
    for layer in slab[1:]:
        layer.copy_(slab[0])
    q = torch.randn(shape.batch, shape.queries, shape.query_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
    attention = plan(
        [layout],
        batch_size=shape.batch,
        num_q_heads=shape.query_heads,
        dtype=q.dtype,
        device=device,
        num_queries=shape.queries,
        past_only=True,
        may_wait=True,
    )
    stores = [PageStore(layout, (layer,), static) for layer in slab]
    for i, its in enumerate(stores):
        attention.bind(i, [its])
    held = per * scheme.page_size
    where = torch.device("cpu") if attention.reads_host else device
    table = Table(
        torch.arange(pages, dtype=torch.int32, device=where).view(shape.batch, per),
        torch.full((shape.batch,), held, dtype=torch.int32, device=where),
    )
    positions = torch.arange(held, held + shape.queries, dtype=torch.int32, device=where).repeat(shape.batch, 1)
    attention.update([table], positions=positions)
    attend = lambda turn: attention.run(q, turn % layers)  # noqa: E731
    want, _ = exact(q[:, -16:], stores[:1], [table], positions=positions[:, -16:])
    unrounded = attention.run(q, 0, out=q.new_empty(q.shape, dtype=attention.result_dtype))
    error = float((unrounded[:, -16:].double() - want).norm() / want.norm())
    if not error <= (most := MOST_ERROR[device.type]):
        raise DataError(
            f"{name}, {shape}, by {attention.choice.backend}: relative error {error:.2e} against float64, above"
            f" {most:g}; please report it"
        )
    return Candidate(name, attend, layers, nbytes, error, attention.choice.backend)


def torchs(shape: Shape, device: torch.device, say: Callable[[str], None]) -> Iterator[Candidate]:
    """Yield torch's attention over dense keys and values, of every dtype and kernel that is here; `say` is told which
    is not.
    """
    group = shape.query_heads // shape.kv_heads
    kinds: list[tuple[torch.dtype, SDPBackend | None]] = [(torch.bfloat16, None), (torch.float32, None)]
    if device.type == "cuda":
        kinds = [(torch.bfloat16, kernel) for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)]
    for dtype, kernel in kinds:
        sizes = (2, shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
        nbytes = int(np.prod(sizes)) * dtype.itemsize
        layers = -(-ROTATE_BYTES[device.type] // nbytes) + 1
        kv = torch.randn(sizes, device=device, dtype=dtype).expand(layers, *sizes).contiguous()
        q = torch.randn(shape.batch, shape.kv_heads, group * shape.queries, shape.head_dim, device=device, dtype=dtype)

        def attend(
            turn: int, q: torch.Tensor = q, kv: torch.Tensor = kv, kernel: SDPBackend | None = kernel
        ) -> torch.Tensor:
            k, v = kv[turn % len(kv)]
            if kernel is None:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)
            with sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        name = f"torch {str(dtype)[6:]}{f' {kernel.name.split(chr(95))[0].lower()}' if kernel is not None else ''}"
        try:
            attend(0)
        except RuntimeError as error:  # a kernel that this card or shape does not have
            say(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        yield Candidate(name, attend, layers, nbytes, 0.0, "torch")


def _timer(candidate: Candidate, shape: Shape, device: torch.device) -> Callable[[int], float]:
    """Return seconds of one call in a round; of a GPU those of a CUDA graph of some calls."""
    if device.type == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

        def on_cpu(turn: int) -> float:
            if shape.queries == 1:
                candidate.run(2 * turn)  # brings code and threads back
            began = clock()
            candidate.run(2 * turn + 1)
            return clock() - began

        return on_cpu
    calls = max(candidate.layers, 8)
    for turn in range(calls):
        candidate.run(turn)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            candidate.run(turn)

    def on_gpu(turn: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    return on_gpu


def rows(
    names: Iterable[str], shape: Shape, device: torch.device, rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for torch's fastest kernel and each preset: seconds (medians), torch's over a preset's, bytes that a
    call reads, error against float64.
    """
    candidates = list(torchs(shape, device, say))
    for name in names:
        say(f"{name}: {shape}")
        candidates.append(packed(name, shape, device))
    timers = [_timer(c, shape, device) for c in candidates]
    times: list[list[float]] = [[] for _ in candidates]
    began = time.perf_counter()
    for turn in range(rounds + 1):
        if turn > LEAST_ROUNDS and time.perf_counter() - began > MOST_SECONDS:
            break
        for timer, found in zip(timers, times, strict=True):
            found.append(timer(turn))
    seconds = {c.name: statistics.median(found[1:]) for c, found in zip(candidates, times, strict=True)}
    rival = min((c.name for c in candidates if c.backend == "torch"), key=lambda name: seconds[name])
    return [
        {
            "shape": str(shape),
            "rounds": len(times[0]) - 1,
            "name": c.name,
            "backend": c.backend,
            "seconds": seconds[c.name],
            "over_torch": seconds[rival] / seconds[c.name],
            "nbytes": c.nbytes,
            "error": c.error or None,
        }
        for c in candidates
    ]
