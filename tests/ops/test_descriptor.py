"""Descriptor of a page for kernels: the header is what Python writes, and a side's numbers are those of its layout."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from kvbits import schemes
from kvbits.ops import descriptor
from kvbits.ops.descriptor import CHANNEL, DTYPES, FORMATS, GROUP, STATIC, describe
from kvbits.spec import FORMATS as NUMBER_FORMATS
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerTensor, PerToken, QuantSpec


def layout_of(key, value=None, page_size=64, head_dim=128):
    return PageLayout(key=key, value=value or key, page_size=page_size, num_kv_heads=2, head_dim=head_dim)


def test_the_header_is_what_the_module_writes():
    assert descriptor.HEADER.read_text() == descriptor.header(), "run python -m kvbits.ops.descriptor"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_reads_the_formats_that_the_spec_names(tmp_path):
    source = tmp_path / "numbers.cpp"
    source.write_text(
        '#include "numbers.h"\nextern "C" NumberFormat at(int format) { return number_format(format); }\nextern "C" int'
        " count() { return NUM_FORMATS; }\n"
    )
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-shared",
            "-fPIC",
            f"-I{descriptor.HEADER.parent}",
            str(source),
            "-o",
            str(tmp_path / "numbers.so"),
        ],
        check=True,
    )

    class NumberFormat(ctypes.Structure):
        _fields_ = [(n, ctypes.c_int) for n in ("levels", "bits0", "bits1", "exponent_bits", "mantissa_bits")] + [
            (n, ctypes.c_float) for n in ("max_value", "saturates_at")
        ]

    library = ctypes.CDLL(str(tmp_path / "numbers.so"))
    library.at.restype = NumberFormat
    assert set(FORMATS) == set(NUMBER_FORMATS) and sorted(FORMATS.values()) == list(range(library.count()))
    for name, number in FORMATS.items():
        fmt, found = NUMBER_FORMATS[name], library.at(number)
        assert (found.bits0, found.bits1) == (*fmt.planes, 0, 0)[:2]
        assert (found.exponent_bits, found.mantissa_bits, found.max_value, found.saturates_at) == (
            fmt.exponent_bits,
            fmt.mantissa_bits,
            fmt.max_value,
            fmt.saturates_at,
        )


def test_floats_end_where_their_bits_end():
    for fmt in NUMBER_FORMATS.values():
        if fmt.kind != "float":
            continue
        assert 1 + fmt.exponent_bits + fmt.mantissa_bits == fmt.bits
        ulp = 2.0 ** (torch.tensor(fmt.max_value).log2().floor().item() - fmt.mantissa_bits)
        assert fmt.saturates_at == fmt.max_value + ulp / 2, "halfway to the number that would come next"


@pytest.mark.parametrize("name", schemes.PRESETS)
def test_a_side_says_where_the_layout_has_its_sections(name):
    scheme = schemes.get(name)
    layout = layout_of(scheme.key, scheme.value, scheme.page_size)
    for kind in "kv":
        side = describe(layout, kind)
        named = {
            f"{kind}_{n}": getattr(side, f"{n}_offset")
            for n in ("scale", "bias", "mean", "stretch", "outlier_index", "outlier_value")
        }
        named |= {
            f"{kind}_raw" if side.is_raw else f"{kind}_plane{i}": offset for i, offset in enumerate(side.plane_offset)
        }
        assert {n: s.offset for n, s in layout.sections.items() if n.startswith(kind)} == {
            n: o for n, o in named.items() if o is not None
        }


def test_kinds_of_scales():
    for granularity, static, want in (
        (PerToken(), False, (GROUP, 128, 1)),
        (PerGroup(32), False, (GROUP, 32, 4)),
        (PerChannel(), False, (CHANNEL, 1, 128)),
        (PerGroup(32), True, (STATIC, 32, 4)),
        (PerTensor(), True, (STATIC, 128, 1)),
    ):
        side = describe(layout_of(QuantSpec(format="int4", granularity=granularity, static=static)), "v")
        assert (side.scale, side.group, side.groups) == want
        assert (side.scale_offset is None) == static


def test_dtypes_have_one_number_whatever_names_them():
    named = {str(t).removeprefix("torch."): n for t, n in descriptor.TORCH_NUMBERS.items()}
    assert named.items() <= DTYPES.items() and sorted(named.values()) == [
        0,
        1,
        2,
    ], "tensors have the first numbers, storage of scales the rest"
