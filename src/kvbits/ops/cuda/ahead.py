"""Kernels that a cache, or vLLM, will launch on a GPU of some compute capability. They are known without a GPU, so that
they can be compiled in advance (`kvbits warm`).

Kernels depend on formats, head sizes and dtypes, not on lengths, batches or kv heads. A test holds this list to what
passes of caches really load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ...runs import cores
from ...spec import LayerGroup, PageLayout
from .. import long_queries
from ..decode import parts_of
from . import attend, close, decode, merge, store
from .engine import kernels, work_list
from .engine.launch import ask_of
from .engine.runtime import driver
from .engine.runtime.compile import Binary, Source, compile_source
from .families import family_of

Capability = tuple[int, int]
MAX_QUERIES = 8
"""Query tokens of a row that engines decode at most: drafts that are verified, and one."""


def of_group(
    group: LayerGroup, num_q_heads: int, dtype: torch.dtype, softcap: bool, capability: Capability
) -> Iterator[Source]:
    """Yield the sources that a layer group of a `PagedCache` launches; softcap: whether its scores have one."""
    tiers = [group.layouts[name] for name in group.tier_pools]
    copies = [group.layouts[name] for name in reversed(group.copy_pools)]
    parts = [group.layouts[name] for name in parts_of(group) if name != "sink" or group.num_sink_tokens]
    raw, packed = [x for x in parts if x.key.is_raw], [x for x in (*parts, *tiers) if not x.key.is_raw]
    for x in dict.fromkeys([*raw, *parts[-1:]]):
        yield from _stored(x, dtype, capability)
    for x in [] if group.fills_pages else packed:
        if close.refuses_layout(x, dtype, capability, "close") is None:
            yield family_of(x).closing(x, dtype, capability, False)
    yield merge.source(group.geometry.value_head_dim, dtype)
    columns = num_q_heads // group.geometry.num_kv_heads
    every = [*packed, *raw[-1:]]
    shown = [every] if group.fills_pages else [raw[-1:], every]  # before a page closes, and then
    for i in range(len(copies) - 1, -1, -1):  # while all closed pages have these copies
        shown.insert(-1, [*copies[i:], *raw[-1:]])
    if tiers:  # which close first
        shown.insert(1, [*tiers, *raw[-1:]])
    for some in shown:
        for n in range(1, -(-long_queries.MIN_COLUMNS_WIDE // columns)):
            yield from _attention(some, n * columns, dtype, softcap, capability)
    together = max(map(len, attend.launches([*parts, *tiers])))
    yield from map(work_list.source, range(1, together + 1))
    for x in (*parts, *tiers):
        if family_of(x).refuses("unpack", x, dtype=dtype) is None:
            yield family_of(x).unpacking(x, dtype)
    if (
        tiers
        or len(copies) > decode.MOST_COPIES
        or (not group.fills_pages and any(close.refuses_layout(x, dtype, capability, "step") for x in packed))
    ):
        return  # the host leads decoding
    yield decode.ADVANCE
    for some in shown if group.fills_pages else (shown[0], shown[-1]):
        yield from _attention(some, columns, dtype, softcap, capability)
        for x in [] if group.token_local else [some[0], *(copies if len(some) > 1 else [])]:
            yield family_of(x).closing(x, dtype, capability, True)


def of_vllm(
    layout: PageLayout,
    copies: Sequence[PageLayout],
    num_q_heads: int,
    dtype: torch.dtype,
    softcap: bool,
    capability: Capability,
) -> Iterator[Source]:
    """Yield the sources that a layer of vLLM launches with its pages.

    Args:
        copies: of its newest pages, raw ones first.
    """
    parts = [layout, *copies]
    for x in parts:
        yield from _stored(x, dtype, capability)
        if family_of(x).refuses("unpack", x, dtype=dtype) is None:
            yield family_of(x).unpacking(x, dtype)
    yield merge.source(layout.value_head_dim, dtype)
    columns = num_q_heads // layout.num_kv_heads
    for n in range(1, MAX_QUERIES + 1):
        yield from _attention(parts, n * columns, dtype, softcap, capability)
    first, *others = map(len, attend.launches(parts))  # the first reads raw copies, too: of the first page or not
    yield from map(work_list.source, [first, *([first + 1] if copies else []), *others])


def distinct(sources: Iterable[Source]) -> list[Source]:
    """Return each source once."""
    return list({(s.folder, s.name, tuple(sorted(s.macros.items())), s.own): s for s in sources}.values())


def compiled(sources: Iterable[Source], capability: Capability) -> Iterator[Binary]:
    """Yield each source when it is there; as many at a time as this process has cores."""
    with ThreadPoolExecutor(cores()) as threads:
        yield from threads.map(lambda s: compile_source(s, s.arch(capability), quiet=True), sources)


def _stored(layout: PageLayout, dtype: torch.dtype, capability: Capability) -> Iterator[Source]:
    if store.refuses_layout(layout, capability, dtype) is None:
        yield from family_of(layout).stores.sources(layout, dtype, capability)


def _attention(
    layouts: Sequence[PageLayout],
    num_columns: int,
    dtype: torch.dtype,
    softcap: bool,
    capability: Capability,
) -> Iterator[Source]:
    """Yield the kernels for pages of these layouts and so many query columns of a kv head (`attend.launches`)."""
    limit = driver.shared_limit(capability)
    if attend.refuses_kernel(layouts, num_columns * layouts[0].num_kv_heads, dtype, 1, limit):
        return
    for own in attend.launches(layouts):
        ask = ask_of([layouts[i] for i in own], num_columns, dtype, softcap, False, limit)
        yield kernels.kernel_for(layouts[own[0]], ask).instance
