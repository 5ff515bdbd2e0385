"""The new form of attention gives the bits of the old one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.cpu_cases import FORMATS, RAW, needs_library, random_call, specs_of
from random_cases import examples

from kvbits.ops import attend as new
from kvbits.ops.cpu import attend_pages as cpu
from kvbits.ops.reference import attend_pages as reference
from kvbits.ops.types import Table

pytestmark = needs_library


def table_of(old, page_size, spans, offset):
    counts = np.diff(old.indptr)
    width = max(1, counts.max()) + offset * (not spans)
    pages = torch.full((len(counts), width), -1, dtype=torch.int32)
    at = torch.zeros(len(counts), width, 2, dtype=torch.int32)
    tokens, starts = torch.zeros(len(counts), dtype=torch.int32), torch.zeros(len(counts), dtype=torch.int32)
    shift = 0 if spans else offset
    for b, n in enumerate(counts):
        its = slice(old.indptr[b], old.indptr[b + 1])
        pages[b, shift : shift + n] = torch.from_numpy(old.page_ids[its].astype(np.int32))
        at[b, :n, 0], at[b, :n, 1] = (torch.from_numpy(x[its].astype(np.int32)) for x in (old.starts, old.lengths))
        if n:
            tokens[b], starts[b] = (n - 1) * page_size + int(old.lengths[its][-1]), int(old.starts[its][0])
    if spans:
        return Table(pages, tokens, spans=at)
    return Table(pages, tokens, starts, torch.full((len(counts),), offset, dtype=torch.int32))


@examples(60)
@given(data=st.data())
def test_same_bits(data):
    draw = data.draw
    known = [RAW, *(s for f in FORMATS for s in specs_of(f, group=16))]
    key, value = (draw(st.sampled_from(known)) for _ in range(2))
    young = draw(st.none() | st.just((specs_of("int4")[0], specs_of("int2")[0])))
    q, call, positions = random_call(
        key,
        value,
        head_dim=draw(st.sampled_from([64, 80, 128])),
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([1, 1, 2, 5, 17])),
        page_size=draw(st.sampled_from([32, 64, 96])),
        pages=draw(st.integers(1, 4)),
        sinks=draw(st.sampled_from([0, 1, 4])),
        first=draw(st.sampled_from([0, 0, 64])),
        window=draw(st.sampled_from([None, None, 40, 150])),
        softcap=draw(st.sampled_from([None, None, 20.0])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        seed=draw(st.integers(0, 1000)),
        young=young,
    )
    spans, offset = draw(st.booleans()), draw(st.integers(0, 2))
    tables = [table_of(p.table, p.store.layout.page_size, spans, offset) for p in call.parts]
    options = dict(scaling=call.scaling, sliding_window=call.sliding_window, softcap=call.softcap)
    stores = [p.store for p in call.parts]
    for backend, old in (("cpu", cpu.attend), ("reference", reference.attend)):
        want = old(q, call, positions)
        got = new.attend(q, stores, tables, positions=positions.int(), backend=backend, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
