"""Pages of trellis codes: the reference, which stays in the basis, against a float64 softmax over dequantized keys;
kernels that refuse them by name.
"""

import numpy as np
import pytest
import torch
from dense_model import dense_attention
from ops.calls import table_of

from kvbits import schemes
from kvbits.ops.cuda.families import family_of
from kvbits.ops.descriptor import DTYPES, LEVELS, describe
from kvbits.ops.reference.attend import PageList, exact
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.ops.types import PageStore
from kvbits.quant.basis import completed
from kvbits.spec import SCALE_8BIT, PageLayout

HEADS, GROUP, SIZE = 2, 3, 64


def layout_of(name, head_dim):
    scheme = schemes.get(name)
    return PageLayout(key=scheme.key, value=scheme.value, page_size=SIZE, num_kv_heads=HEADS, head_dim=head_dim)


def made(name, head_dim, starts, lengths):
    """A store, and the table of one sequence with pages at `starts`, and the dense keys and values that they read as, in float64."""
    layout = layout_of(name, head_dim)
    basis = torch.eye(head_dim) * 2 + torch.randn(HEADS, head_dim, head_dim) / head_dim**0.5
    static = completed(
        {"k_basis": basis, "k_mean": torch.randn(HEADS, 2, head_dim) + 1},
        10_000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2)),
    )
    k, v = torch.randn(2, len(starts), HEADS, SIZE, head_dim)
    pages, _ = close_pages(k + 1, v, layout, static, np.array(starts))
    pages_of = PageList(np.array([0, len(starts)]), np.arange(len(starts)), np.array(starts), np.array(lengths))
    dense = dequantize_pages(pages, layout, static, torch.float64, starts=np.array(starts))
    held = [torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)]) for x in dense]
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    return PageStore(layout, (pages,), static), table_of(pages_of, SIZE), held, positions


@pytest.mark.parametrize("name", ["klt4", "klt3", "klt2"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_in_the_basis_is_attention_over_what_the_pages_read_as(name, head_dim, dtype):
    """Pages of three frames, one cut short, in an order that is not the frames'."""
    starts, lengths = [516, 0, 580, 260, 68], [64, 64, 20, 64, 64]
    store, table, held, positions = made(name, head_dim, starts, lengths)
    q = torch.randn(1, 2, HEADS * GROUP, head_dim)
    at = torch.tensor([[300, 700]], dtype=torch.int32)
    out, lse = exact(q, [store], [table], positions=at, scaling=0.2, dtype=dtype)
    for t, position in enumerate((300, 700)):
        seen = torch.from_numpy(np.flatnonzero(positions <= position))
        want, want_lse = dense_attention(
            q[0, t : t + 1], held[0][seen], held[1][seen], [len(seen) - 1], 0.2, None, None
        )
        torch.testing.assert_close(out[0, t].double(), want[0], rtol=0, atol=1e-9 if dtype == torch.float64 else 2e-5)
        torch.testing.assert_close(
            lse[0, t].double(), want_lse[0], rtol=0, atol=1e-9 if dtype == torch.float64 else 2e-4
        )


def test_a_family_of_its_own_has_kernels_for_trellis_codes():
    layout = layout_of("klt2", 64)
    family = family_of(layout)
    assert [family.refuses(op, layout, dtype=torch.bfloat16) for op in ("attend", "close", "step", "unpack")] == [
        None
    ] * 4


def test_sides_name_the_planes_of_bands():
    side = describe(layout_of("klt2", 64), "k")
    assert (side.planes, side.row_bytes, side.plane_offset) == ((4, 2, 1), (8, 8, 4), (0, 512, 1024))
    assert (side.widths, side.scale_dtype, side.levels, side.offsets) == (
        (5, 3, 2, 0),
        DTYPES[SCALE_8BIT],
        LEVELS["trellis"],
        True,
    )
