"""study_fold.py without a GPU: values that a model's weights would turn are stored as the preset stores values, and what it times compiles."""

from __future__ import annotations

import dataclasses

import pytest
import study_fold as study
import torch

from kvbits import schemes
from kvbits.ops.reference.close import close_pages
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.quant.basis import hadamard
from kvbits.spec import PageLayout, QuantSpec


@pytest.fixture
def pages():
    """Of a preset and of its fold, keys raw: (layout, pages) each, from values with a common bias, of very different size."""

    def made(name):
        k = torch.randn(4, 2, 64, 128)
        v = torch.randn(4, 2, 64, 128) * torch.randn(4, 2, 64, 1).exp() + 3 * torch.randn(2, 1, 128)
        scheme = schemes.get(name)
        layouts = [PageLayout(key=QuantSpec.raw(), value=s.value, page_size=64, num_kv_heads=2, head_dim=128) for s in (scheme, study.fold(scheme))]
        return [(layout, close_pages(k, x, layout)[0]) for layout, x in zip(layouts, (v, hadamard(v)), strict=True)]

    return made


@pytest.mark.parametrize("name", ["klt4", "klt2"])
def test_values_that_come_turned_are_stored_as_the_preset_s(pages, name):
    with study.folded():
        (layout, preset), (unturned, fold) = pages(name)
    assert torch.equal(preset, fold) and unturned.head_bytes == layout.head_bytes
    values = dequantize_pages(preset, layout, {}, torch.float32)[1]
    assert torch.allclose(hadamard(dequantize_pages(fold, unturned, {}, torch.float32)[1]), values, atol=1e-5 * float(values.abs().max()))


def test_outside_of_it_values_without_a_basis_try_seven_scales(pages):
    (_, preset), (_, fold) = pages("klt4")
    assert not torch.equal(preset, fold)


def test_only_what_has_no_basis_comes_from_the_copy():
    scheme = schemes.get("klt4")
    with study.folded():
        preset, fold = (dict((what.partition(", ")[2], source) for what, source, _ in study.sources(s)) for s in (scheme, study.fold(scheme)))
        text = (fold["store, pages"].folder / "store_banded.cu").read_text()
    assert "BASIS == HADAMARD ? 5" not in text and text.count("BASIS != CALIBRATED ? ") == 2
    assert len(preset) == 5 and preset.keys() == fold.keys()
    for what, source in preset.items():
        assert (fold[what].folder != source.folder) == what.startswith("store"), what
        assert dict(source.macros) != dict(fold[what].macros), "two kernels are compared"
    assert study.store.source.__module__ == study.store.__name__


def test_the_fold_s_output_turned_once_is_the_preset_s():
    from ops.cpu_cases import static_params

    from kvbits.ops.reference.attend import attend
    from kvbits.ops.types import AttendCall, PageStore, PageTable, Part

    scheme = schemes.get("klt4")
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=64, num_kv_heads=2, head_dim=128)
    static = static_params(scheme.key, scheme.value, 2, 128)
    starts = torch.arange(0, 256, 64).numpy()
    slab = close_pages(*(torch.randn(4, 2, 64, 128) for _ in "kv"), layout, static, starts)[0]
    table = PageTable(*(torch.tensor(x).numpy() for x in ([0, 4], [0, 1, 2, 3], [0, 64, 128, 192])), torch.full((4,), 64, dtype=torch.int32).numpy())
    call = AttendCall((Part(PageStore(layout, (slab,), static), table),), 128**-0.5)
    fold = study.unturned(call)
    assert fold.parts[0].store.slabs is call.parts[0].store.slabs and dataclasses.replace(fold, parts=call.parts) == call
    q, at = torch.randn(1, 1, 8, 128), torch.tensor([[255]])
    outs = [attend(q, x, at, torch.float64)[0] for x in (call, fold)]
    assert study.close_to(hadamard(outs[1]), outs[0], "") < 1e-6
    with pytest.raises(SystemExit, match="not turned: error 1"):
        study.close_to(outs[1], outs[0], "not turned")
