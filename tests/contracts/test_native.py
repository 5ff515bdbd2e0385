"""Every scheme of the core is served by native kernels on CPUs and on GPUs: decoding, chunks past the pages, pages that
close, tokens that are stored one by one, pages that become rows.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from messages import raises

from kvbits import schemes
from kvbits.errors import SpecError, UnsupportedError
from kvbits.ops import dispatch
from kvbits.spec import PageLayout, PerGroup, QuantSpec

NATIVE = {"decode", "chunk", "close", "store", "unpack"}


def layout_of(name, head_dim=128, raw_dtype="bfloat16"):
    scheme = schemes.get(name, head_dim=head_dim)
    return PageLayout(
        key=scheme.key,
        value=scheme.value,
        page_size=scheme.page_size,
        num_kv_heads=8,
        head_dim=head_dim,
        raw_dtype=raw_dtype,
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", schemes.CORE)
def test_core_schemes_are_native_on_both_backends(name, head_dim):
    layout = layout_of(name, head_dim)
    found = {op: answers for op, answers in dispatch.natives(layout).items() if op in NATIVE}
    assert {"decode", "chunk"} < found.keys() and found.keys() & {"close", "store"}
    by_reference = {(op, backend): why for op, answers in found.items() for backend, why in answers.items() if why}
    assert not by_reference, dispatch.table({name: name})
    assert all(answers.keys() == {"cpu", "cuda"} for answers in found.values())


def test_the_core_is_small():
    assert len(schemes.CORE) <= 9


def test_the_table_gives_reasons():
    spec = QuantSpec(format="int4", granularity=PerGroup(2))
    answers = dispatch.natives(PageLayout(key=spec, value=spec, page_size=64, num_kv_heads=1, head_dim=64))
    assert "groups of 2 channels" in answers["decode"]["cpu"] and "2 channels" in answers["close"]["cuda"]
    assert "float32" in dispatch.natives(layout_of("raw", raw_dtype="float32"))["decode"]["cuda"]
    assert "store" not in dispatch.natives(layout_of("kivi4")) and "close" not in dispatch.natives(layout_of("raw"))


def test_it_is_printed_without_a_gpu():
    out = subprocess.run(
        [sys.executable, "-m", "kvbits.ops.dispatch"], capture_output=True, text=True, check=True
    ).stdout
    assert (
        all(f"{kind}: " in out for kind in ("raw", "int", "trellis", "codebook")) and "native" in out and "[1]" in out
    )


def test_choices_say_why():
    given = layout_of("int8"), torch.float64
    choice = dispatch.choose("unpack", *given, torch.device("cpu"))
    assert choice.backend == "reference"
    assert str(choice) == f"unpack by reference (cpu: {choice.refusals['cpu']}; cuda: {choice.refusals['cuda']})"
    choice.prepare()
    with raises(UnsupportedError, "cpu", "cuda", "reference", "meta"):
        dispatch.choose("unpack", *given, torch.device("meta"))
    with raises(SpecError, "'cuda'", "backend='auto'"):
        dispatch.choose("unpack", *given, torch.device("cpu"), backend="cuda")
    with raises(SpecError, "'gpu'", "auto", "cpu", "cuda", "reference"):
        dispatch.choose("unpack", *given, torch.device("cpu"), backend="gpu")
