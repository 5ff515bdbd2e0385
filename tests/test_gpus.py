"""Cards by name have what torch reports; "80GB" is such a name; other sizes are what they say."""

from __future__ import annotations

import pytest
from messages import raises

from kvbits.errors import SpecError
from kvbits.gpus import CARDS, MIB, SIZES, gpu_memory
from kvbits.units import GB, GIB


@pytest.mark.parametrize(
    ("text", "card"),
    [
        ("H100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100-nvl", "H100 NVL"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("a100", "A100"),
        ("A100 40G", "A100-40GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200 NVL", "H200"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("L40S", "L40S"),
        ("L4", "L4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("H200", "H200"),
    ],
)
def test_cards_by_name(text, card):
    found = gpu_memory(text)
    assert found.nbytes == CARDS[card][1] * MIB and found.said.startswith(f"{card}: ") and "GiB" in found.said


def test_every_card_is_found_by_its_own_name_and_has_about_what_it_is_called():
    for name, (size, mib) in CARDS.items():
        assert gpu_memory(name).nbytes == mib * MIB
        assert 0.91 * size * GIB < mib * MIB < 1.003 * size * GIB


def test_a_size_that_cards_are_called_by_is_the_least_of_these():
    for size in (24, 40, 48, 80, 96, 141):
        found = gpu_memory(f"{size}GB")
        assert found.nbytes == min(mib for s, mib in CARDS.values() if s == size) * MIB
        assert SIZES[size] in found.said and f"{size}GB" in found.said and f"{size}GiB" in found.said
    assert gpu_memory("80GB").nbytes == pytest.approx(85 * GB, rel=0.002), (
        "an 80 GB card has more than 80 x 10**9 bytes"
    )
    assert gpu_memory("h200").nbytes == pytest.approx(139.8 * GIB, rel=1e-3), "what this project's runs had"


def test_other_sizes_are_what_they_say():
    for text, nbytes in (
        ("36GB", 36 * GB),
        ("80GiB", 80 * GIB),
        ("80000MB", 80 * GB),
        ("1.5TB", 1500 * GB),
        ("80.5GB", int(80.5 * GB)),
    ):
        found = gpu_memory(text)
        assert found.nbytes == nbytes and found.said is None
    for text in ("80", "V100", "80Gb", "", "GB"):
        with raises(SpecError, "--gpu-memory", repr(text), "bytes", "L4"):
            gpu_memory(text)


def test_a_size_in_any_spelling_is_the_same_card():
    assert len({gpu_memory(text).nbytes for text in ("80GB", "80 gb", "80gB")}) == 1
