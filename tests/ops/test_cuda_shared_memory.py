"""Shared memory that kernels ask for: it fits into a block's on every card that we know, or kernels are refused before
their launch. Needs no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from nightly import at_night

from kvbits import schemes
from kvbits.errors import SpecError, UnsupportedError
from kvbits.ops.cuda import attend, close, store
from kvbits.ops.cuda.engine import kernels
from kvbits.ops.cuda.engine.launch import ask_of
from kvbits.ops.cuda.engine.runtime import driver
from kvbits.ops.cuda.families import family_of
from kvbits.spec import PageLayout

HEAD_DIMS = (64, 96, 128, 256, 512)
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24, 49, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
KV_HEADS = 8


def layouts_of(head_dim: int) -> Iterator[list[PageLayout]]:
    """Pages of every preset, then its copies; by pages as the preset has them and by others."""
    for name in schemes.PRESETS:
        with contextlib.suppress(SpecError):  # not of such heads
            scheme = schemes.get(name, head_dim=head_dim)
            for page_size in sorted({scheme.page_size, 32, 64, 128, 256}):
                with contextlib.suppress(SpecError):  # not of such pages
                    yield pages_of(scheme, head_dim, page_size)


def pages_of(scheme: schemes.Scheme, head_dim: int, page_size: int) -> list[PageLayout]:
    return [
        PageLayout(key=x.key, value=x.value, page_size=page_size, num_kv_heads=KV_HEADS, head_dim=head_dim)
        for x in (scheme, *scheme.copies)
    ]


def plans_of(layouts: list[PageLayout]) -> Iterator[list[PageLayout]]:
    """Parts of a plan: pages, with copies if there are any, and with raw tokens."""
    raw = schemes.get("raw")
    for packed in dict.fromkeys((tuple(layouts[:1]), tuple(layouts))):
        yield list(packed)
        yield [*packed, dataclasses.replace(layouts[0], key=raw.key, value=raw.value)]


def refuses(plan: list[PageLayout], columns: int, limit: int | None) -> str | None:
    return attend.refuses_kernel(plan, columns * KV_HEADS, torch.bfloat16, 1, limit)


def asked(plan: list[PageLayout], columns: int, limit: int):
    """(layout, ask) of each kernel of a plan."""
    for own in attend.launches(plan):
        read = [plan[i] for i in own]
        yield read[0], ask_of(read, columns, torch.bfloat16, False, False, limit)


@pytest.mark.parametrize("head_dim", [128, *at_night(*(d for d in HEAD_DIMS if d != 128))])
@pytest.mark.parametrize("limit", sorted(set(driver.SHARED_BYTES.values())))
def test_attention_fits_a_block_or_is_refused(limit, head_dim):
    served = 0
    for layouts in layouts_of(head_dim):
        for plan in plans_of(layouts):
            for columns in COLUMNS:
                if refuses(plan, columns, None):
                    continue
                if refuses(plan, columns, limit):
                    with pytest.raises(UnsupportedError):
                        for layout, ask in asked(plan, columns, limit):
                            kernels.kernel_for(layout, ask)
                    continue
                for layout, ask in asked(plan, columns, limit):
                    kernel = kernels.kernel_for(layout, ask)
                    served += 1
                    assert kernel.shared_bytes <= limit, (layout, columns, kernel.shape)
    assert served


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["klt4", "klt3", "klt2"])
def test_every_card_reads_trellis_codes_of_up_to_64_columns(name, head_dim):
    scheme = schemes.get(name, head_dim=head_dim)
    layouts = pages_of(scheme, head_dim, scheme.page_size)
    for limit in set(driver.SHARED_BYTES.values()):
        for plan in plans_of(layouts):
            assert not [why for n in COLUMNS if n <= 64 and (why := refuses(plan, n, limit))]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", driver.SHARED_BYTES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_what_writes_and_unpacks_pages_fits_a_block_or_is_refused(capability, head_dim):
    served = 0
    for layout, *_ in layouts_of(head_dim):
        family = family_of(layout)
        for dtype in DTYPES:
            sources = []
            if store.refuses_layout(layout, capability, dtype) is None:
                sources += family.stores.sources(layout, dtype, capability)
            for op, appends in (("close", False), ("step", True)):
                if close.refuses_layout(layout, dtype, capability, op) is None:
                    sources.append(family.closing(layout, dtype, capability, appends))
            if family.refuses("unpack", layout, dtype=dtype) is None:
                sources.append(family.unpacking(layout, dtype))
            for source in sources:
                served += 1
                assert int(source.macros.get("SHARED_BYTES", 0)) <= driver.shared_limit(capability), (source, layout)
    assert served
