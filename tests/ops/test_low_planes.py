"""Low planes: literal bytes, exact demotion, precision against plain INT8, and the CPU kernels that read and write
them.
"""

from __future__ import annotations

import dataclasses

import bounds
import numpy as np
import pytest
import torch
from ops.cpu_cases import NOISE, RAW, banded, needs_library, random_call, specs_of
from ops.test_cpu_attend import assert_close, judge
from ops.test_cpu_close import static_params, ugly

from kvbits.errors import DataError, UnsupportedError
from kvbits.ops.cpu import attend as attend_cpu
from kvbits.ops.cpu import close as close_cpu
from kvbits.ops.reference import close as close_reference
from kvbits.ops.reference.close import close_nested, close_pages
from kvbits.ops.reference.dequantize import dequantize_pages, section, stored_qparams
from kvbits.ops.types import LowStore, PageStore, PageTable
from kvbits.quant.qparams import expand
from kvbits.spec import LowLayout, PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

BASES = ["int8", "int4", "int3", "int2"]


def layouts(key: QuantSpec, value: QuantSpec, widths, *, head_dim: int = 64, page_size: int = 64, heads: int = 2):
    page = PageLayout(
        key=key, value=value, page_size=page_size, num_kv_heads=heads, head_dim=head_dim, raw_dtype="float32"
    )
    return page, [
        LowLayout(key_bits=k, value_bits=v, page_size=page_size, num_kv_heads=heads, head_dim=head_dim)
        for k, v in widths
    ]


def closed(spec: QuantSpec, widths, *, head_dim: int = 64, page_size: int = 64):
    """(k, v, page layout, low layouts, static, pages) of three awkward pages."""
    page, low = layouts(spec, spec, widths, head_dim=head_dim, page_size=page_size)
    k, v = (ugly((3, 2, page_size, head_dim), torch.float32) for _ in "kv")
    static = static_params(spec, spec, 2, head_dim)
    return k, v, page, low, static, close_nested(k, v, page, static, low)[0]


def test_literal_bytes():
    """docs/reference/formats.md, by hand: scale 1, values 16 channels wide, one token that counts in 15ths."""
    spec = QuantSpec(format="int4", granularity=PerToken(), scale_dtype="float32")
    page, (low,) = layouts(spec, spec, [(4, 4)], head_dim=8, page_size=32, heads=1)
    x = torch.zeros(1, 1, 32, 8)
    x[0, 0, 0] = torch.tensor([7, 1 + 7 / 15, -1 - 7 / 15, 1 / 15, -3 / 15, 2.5 + 0.01, -7, 0])
    (stored, fine), _ = close_nested(x, x, page, None, [low])
    assert (low.sections["k_plane0"].offset, low.sections["v_plane0"].offset, low.head_bytes) == (0, 128, 256)
    codes = [15, 9, 7, 8, 8, 11, 1, 8]
    # 2.51 is code 3 less 7.35 / 15; residuals 0 7 -7 1 -3 -7 0 0 are stored as r + 8
    planes = [8, 15, 1, 9, 5, 1, 8, 8]
    for pages, layout, want in ((stored, page, codes), (fine, low, planes)):
        rows = [want[r] | want[r + 4] << 4 for r in range(4)]
        for kind in "kv":
            found = section(pages, layout, f"{kind}_plane0").flatten().tolist()
            # keys: 4 bytes of 16 tokens; values: blocks 4 wide, four tokens alternate
            assert [found[i] for i in ((0, 1, 2, 3) if kind == "k" else (0, 4, 8, 12))] == rows
            zero = 8 | 8 << 4
            others = {0, 1, 2, 3} if kind == "k" else {0, 4, 8, 12}
            assert all(b == zero for i, b in enumerate(found) if i not in others)
    got, _ = dequantize_pages(stored, page, None, torch.float64, [(fine, low)])
    want = torch.tensor([7, 1 + 7 / 15, -1 - 7 / 15, 1 / 15, -3 / 15, 3 - 7 / 15, -7, 0], dtype=torch.float64)
    assert torch.allclose(got[0, 0, 0], want, rtol=0, atol=1e-15)
    assert not got[0, 0, 1:].any(), "zeros stay zeros"


@pytest.mark.parametrize("fmt", BASES)
def test_the_page_of_a_chain_is_what_direct_quantization_stores(fmt):
    """Demotion drops the plane, so the cold value is direct quantization bit for bit: symmetric or not, per token,
    group and channel, static or not.
    """
    for spec in specs_of(fmt, group=16):
        k, v, page, _, static, pages = closed(spec, [(4, 2), (2, 4)])
        assert torch.equal(pages[0], close_pages(k, v, page, static)[0])
        fewer = close_nested(k, v, page, static, layouts(spec, spec, [(4, 2)])[1])[0]
        assert torch.equal(fewer[1], pages[1]), "a longer chain only adds planes"


@pytest.mark.parametrize("fmt", BASES)
def test_every_plane_refines_within_the_bound(fmt):
    for spec in specs_of(fmt, group=16):
        if spec.static:
            continue
        k, v, page, low, static, pages = closed(spec, [(4, 2), (2, 4)])
        for planes in range(3):
            chain = list(zip(pages[1:], low, strict=True))[:planes]
            got = dequantize_pages(pages[0], page, static, torch.float64, chain)
            for kind, x, y in (("k", k, got[0]), ("v", v, got[1])):
                widths = [(y_.key_bits if kind == "k" else y_.value_bits) for _, y_ in chain]
                bound = bounds.plain(spec, stored_qparams(pages[0], page, kind, static), 64, widths)
                assert bool(((x.double() - y).abs() <= bound.double() * (1 + 1e-5) + 1e-30).all()), (spec, planes)


@pytest.mark.parametrize("symmetric, factor", [(True, 127 / 105), (False, 255 / 225)])
@pytest.mark.parametrize("granularity", [PerToken(), PerGroup(32), PerChannel()])
def test_four_and_four_bits_are_near_plain_int8(symmetric, factor, granularity):
    """Largest and mean square error, against INT8 with scales shared alike: the step is `factor` times INT8's, and
    nothing else is lost.
    """
    torch.manual_seed(1)
    x = torch.randn(64, 1, 64, 128) * torch.randn(128).exp() + torch.randn(128)
    errors = {}
    for name, fmt, widths in (("int8", "int8", []), ("4+4", "int4", [(4, 4)]), ("int4", "int4", [])):
        spec = QuantSpec(format=fmt, granularity=granularity, symmetric=symmetric, scale_dtype="float32")
        page, low = layouts(spec, spec, widths, head_dim=128, heads=1)
        pages, _ = close_nested(x, x, page, None, low)
        got, _ = dequantize_pages(pages[0], page, None, torch.float64, list(zip(pages[1:], low, strict=True)))
        step = expand(stored_qparams(pages[0], page, "k", {}).scale, spec, 128).double() / (15 if widths else 1)
        assert float(((x - got).abs() / step).max()) <= 0.5 + 1e-3
        errors[name] = float(((x - got) ** 2).mean().sqrt())
    assert errors["4+4"] <= errors["int8"] * factor * 1.02
    assert errors["int4"] > 10 * errors["int8"]


@pytest.mark.parametrize("spec", specs_of("int4", group=16))
def test_judge_reads_the_chain_it_is_given(spec):
    """The reference's attention over young pages is attention over the refined values, in float64."""
    q, call, positions = random_call(spec, spec, low=(4, 4), dtype=torch.float32)
    young = dataclasses.replace(call, parts=call.parts[1:2])
    out, _ = judge(q, young, positions)
    part = young.parts[0]
    for b in range(q.shape[0]):
        rows = range(part.table.indptr[b], part.table.indptr[b + 1])
        keys, values = [], []
        for e in rows:
            fine = [(s.page(int(i[e])), s.layout) for s, i in zip(part.low, part.table.low, strict=True)]
            fine = [(x[None], y) for x, y in fine]
            page, starts = part.store.page(int(part.table.page_ids[e]))[None], part.table.starts[e : e + 1]
            k, v = dequantize_pages(page, part.store.layout, part.store.static, torch.float64, fine, starts)
            keys.append(k[0, :, : part.table.lengths[e]])
            values.append(v[0, :, : part.table.lengths[e]])
        if not keys:
            continue
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        scores = torch.einsum("hgd,hnd->hgn", q[b, 0].double().unflatten(0, (2, -1)), k) * call.scaling
        want = (torch.softmax(scores, -1) @ v).flatten(0, 1)
        assert torch.allclose(out[b, 0], want, rtol=1e-9, atol=1e-9)


# -- CPU kernels
# --------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("fmt", BASES)
def test_cpu_closes_the_same_bytes_as_the_reference(tier, fmt):
    for i, spec in enumerate(specs_of(fmt, group=16)):
        head_dim, page_size = [(64, 64), (80, 32), (128, 96)][i % 3]
        for bits in ((4, 4), (2, 4), (0, 2)):
            for dtype in (torch.float32, torch.bfloat16):
                page, (low,) = layouts(spec, spec, [bits], head_dim=head_dim, page_size=page_size)
                static = static_params(spec, spec, 2, head_dim)
                k, v = (ugly((3, 2, page_size, head_dim), dtype) for _ in "kv")
                found = []
                for close in (close_cpu.close, close_reference.close):
                    pages, planes = (torch.full((5, 3, x.head_bytes), 0xFF, dtype=torch.uint8) for x in (page, low))
                    fine = LowStore(low, (planes[:2, :2], planes[2:, :2]))
                    close(
                        k,
                        v,
                        PageStore(page, (pages[:, :2],), static),
                        np.array([4, 0, 3]),
                        [(fine, np.array([1, 4, 2]))],
                    )
                    found.append((pages, planes))
                (pages, planes), (want_pages, want_planes) = found
                assert torch.equal(pages, want_pages)
                assert torch.equal(planes, want_planes), f"{spec} {bits} head_dim={head_dim} {dtype}"


def young_only(case):
    """A case without its 4-bit and raw parts."""
    q, call, positions = case
    return q, dataclasses.replace(call, parts=call.parts[1:2]), positions


@needs_library
def test_cpu_reads_every_granularity_as_precisely_as_int8(tier):
    for spec in specs_of("int4"):
        for head_dim, group in ((128, 4), (96, 7), (64, 3)):
            case = young_only(random_call(spec, spec, head_dim=head_dim, group=group, low=(4, 4), dtype=torch.float32))
            assert_close(attend_cpu.attend(*case), judge(*case), NOISE["int8"])


@needs_library
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 80, 96, 128, 256, 512])
def test_cpu_head_dims(tier, head_dim):
    key = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False)
    value = QuantSpec(format="int4", granularity=PerToken(), symmetric=False)
    case = young_only(random_call(key, value, head_dim=head_dim, low=(4, 4), tokens=3, page_size=96))
    assert_close(attend_cpu.attend(*case), judge(*case), NOISE["int8"])


@needs_library
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("bits", [(4, 4), (4, 0), (0, 4)])
def test_cpu_mixes_tiers_in_one_call(tier, group, bits):
    """Ragged sequences, each with old and young pages, sinks and a raw tail; window and cap."""
    spec = QuantSpec(format="int4", granularity=PerGroup(32), symmetric=False)
    for window, softcap, tokens in ((None, None, 1), (90, 20.0, 1), (None, None, 20)):
        case = random_call(
            spec, spec, low=bits, group=group, batch=3, pages=5, window=window, softcap=softcap, tokens=tokens
        )
        assert_close(attend_cpu.attend(*case), judge(*case), NOISE["int4"])


@needs_library
def test_cpu_says_which_chains_it_cannot_read():
    for fmt, bits in (("int8", (4, 4)), ("int4", (2, 4)), ("int3", (4, 4))):
        q, call, positions = random_call(QuantSpec(format=fmt), QuantSpec(format=fmt), low=bits)
        assert "the CPU kernels read 4 bits under int4" in attend_cpu.refuses(q, call)
        with pytest.raises(UnsupportedError, match="low planes refine 4-bit codes by 4 bits"):
            attend_cpu.attend(q, call, positions)
    q, call, _ = random_call(QuantSpec(format="int4"), QuantSpec(format="int4"), low=(4, 4))
    twice = dataclasses.replace(call.parts[1], low=call.parts[1].low * 2)
    assert "pages with 2 low planes each" in attend_cpu.refuses(q, dataclasses.replace(call, parts=(twice,)))


@needs_library
def test_cpu_checks_low_page_ids():
    q, call, positions = random_call(QuantSpec(format="int4"), QuantSpec(format="int4"), low=(4, 4))
    part = call.parts[1]
    for bad in (-1, 10**6):
        t = part.table
        table = PageTable(t.indptr, t.page_ids, t.starts, t.lengths, (np.full_like(t.low[0], bad),))
        with pytest.raises(DataError, match="names a page that its store does not have"):
            attend_cpu.attend(q, dataclasses.replace(call, parts=(dataclasses.replace(part, table=table),)), positions)


def test_raw_has_no_planes():
    assert not RAW.number_format.planes


@pytest.mark.parametrize("close", [close_cpu.close, close_reference.close])
def test_banded_codes_have_no_planes(close):
    spec = banded(2, 2, 2, 2, basis="hadamard")
    page, (low,) = layouts(spec, spec, [(2, 2)])
    store, fine = (
        cls(x, (torch.zeros(1, 2, x.head_bytes, dtype=torch.uint8),)) for cls, x in ((PageStore, page), (LowStore, low))
    )
    with pytest.raises(DataError, match="a low plane of 2 bits under banded keys; low planes refine integer codes"):
        close(*torch.randn(2, 1, 2, 64, 64), store, np.array([0]), [(fine, np.array([0]))])
