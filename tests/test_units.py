"""Sizes as people write them; what could mean two things is refused."""

from __future__ import annotations

import pytest

from kvbits.errors import SpecError
from kvbits.units import GB, GIB, dtype_name, human_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24 * GB),
        ("24GiB", 24 * GIB),
        ("1.5 gb", 1_500_000_000),
        ("0.5GiB", GIB // 2),
        ("512MB", 512 * 10**6),
        ("2TiB", 2**41),
        ("7B", 7),
    ],
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["24", "24G", "", "GB", "-1GB", "1e9", "24 GBit", "0GB", "1,5GB", "nanGB", "9" * 5000 + "GB", "99999999TB"]
)
def test_bytes_that_are_ambiguous_are_refused(text):
    with pytest.raises(SpecError, match=r"--memory .*"):
        parse_bytes(text, "--memory")
    with pytest.raises(SpecError) as raised:
        parse_bytes(text)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("8k", 8192), ("8K", 8192), ("1.5k", 1536), ("1M", 2**20), ("131,072", 131072), (" 7 ", 7)],
)
def test_tokens(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "k", "8kB", "-1", "0", "1.5", "0.0001k", "8 192", "1e3", "1,00", "inf", "9" * 5000, "9" * 20]
)
def test_tokens_that_cannot_be_are_refused(text):
    with pytest.raises(SpecError, match="--context"):
        parse_tokens(text, "--context")


def test_tokens_below_a_least_are_refused():
    assert parse_tokens("2", least=2) == 2
    with pytest.raises(SpecError, match="'1' is less than 2"):
        parse_tokens("1", least=2)


def test_dtypes_have_torch_s_names():
    assert [dtype_name(t) for t in ("bf16", "FP16", "half", "fp32", "bfloat16", "auto", "int9")] == [
        "bfloat16",
        "float16",
        "float16",
        "float32",
        "bfloat16",
        "auto",
        "int9",
    ]


@pytest.mark.parametrize(
    ("n", "text"),
    [(999, "999 B"), (1500, "1.50 kB"), (2_500_000, "2.50 MB"), (41 * GB, "41.00 GB"), (3 * 10**12, "3.00 TB")],
)
def test_human_bytes(n, text):
    assert human_bytes(n) == text
