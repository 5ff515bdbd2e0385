"""Ways to attend on the CPU that are measured once: what is kept decides, and every way agrees with float64."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from messages import mentions
from ops.cpu_cases import NOISE, TILE_TIERS, assert_close, needs_library, random_call

from kvbits import schemes
from kvbits.ops.cpu import attend, autotune, library

pytestmark = needs_library
PRESETS = ("raw", "int8_centered", "int4", "kivi4", "klt4")
ROUNDED = 1e-2
"""Relative L2 error allowed where numbers are rounded to bfloat16."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    return tmp_path / autotune.FOLDER


def chunk(name="int4", tokens=40, held=4200, **changes):
    """Queries behind a history."""
    scheme = schemes.get(name, head_dim=64)
    pages = -(-held // scheme.page_size)
    case = random_call(
        scheme.key, scheme.value, page_size=scheme.page_size, heads=1, group=4, tokens=tokens, pages=pages, **changes
    )
    case.positions = torch.where(case.positions < 0, case.positions, case.positions + tokens)
    return case


def attended(case):
    """Return a plan for chunks and what it answered."""
    plan = case.plan(past_only=True)
    plan.bind(0, case.stores)
    plan.update(case.tables, positions=case.positions)
    out = torch.empty(*case.q.shape[:3], case.stores[0].layout.value_head_dim)
    lse = torch.empty(case.q.shape[:3])
    plan.run(case.q, 0, out=out, lse=lse)
    return plan, (out, lse)


def files(folder):
    return {path: path.read_text() for path in folder.glob("*")}


def test_a_kind_of_call_is_measured_once(folder):
    case = chunk()
    first, _ = attended(case)
    (path, text), *others = files(folder).items()
    found = json.loads(text)
    assert not others and str(path) in first.explain()
    assert found["machine"]["tier"] == library.tier()
    assert set(found["seconds"]) == set(attend.ways(first.layouts, **options_of(case))) > {"kernels"}
    assert all(x > 0 for x in found["seconds"].values())
    second, _ = attended(case)
    assert files(folder) == {path: text} and second.explain() == first.explain()
    attended(chunk("int8_centered"))
    assert len(files(folder)) == 2


@pytest.mark.parametrize("tiles", TILE_TIERS)
def test_calls_that_differ_in_options_are_measured_apart(tiles):
    before = library.tier()
    library.set_tier(tiles)
    try:
        case = chunk("int8_centered")
        calls = ({}, {"past_only": False}, {"softcap": 20.0})
        plans = [attend.plan(case.plan().layouts, **options_of(case, **changes)) for changes in calls]
        assert len({autotune._file_name(plan._facts) for plan in plans}) == 3
    finally:
        library.set_tier(before)


def options_of(case, **changes):
    """Return the options that the backend gets."""
    given = {"batch_size": len(case.q), "num_q_heads": case.q.shape[2], "num_queries": case.q.shape[1]}
    given |= {"dtype": case.q.dtype, "device": case.q.device, "spans": False, "past_only": True}
    return given | case.options | changes


@pytest.mark.parametrize("name", PRESETS)
def test_the_fastest_that_is_kept_is_taken(folder, name):
    """Each way in its turn, with padding and a query that is not finite."""
    case = chunk(name)
    attended(case)
    ((path, text),) = files(folder).items()
    noise = NOISE[case.stores[0].layout.key.format]
    for way in json.loads(text)["seconds"]:
        kept = json.loads(text)
        kept["seconds"][way] /= 1e6
        path.write_text(json.dumps(kept))
        plan, found = attended(case)
        named = way.removeprefix("unpacked to ")
        assert (f"pages unpacked to {named}" in plan.explain()) == (named != way)
        rounded = way in ("unpacked to bfloat16", "one term")
        assert_close(found, case.exact(), max(noise, ROUNDED) if rounded else noise)
    bad = chunk(name)
    bad.q[0, 1, 2, 60] = torch.nan
    for x, y in zip(attended(bad)[1], bad.exact(), strict=True):
        assert torch.equal(x.isnan(), y.isnan()) and y[0, 1, 2].isnan().all()


def test_numbers_are_rounded_where_results_are():
    for name in PRESETS:
        case = chunk(name)
        assert "unpacked to bfloat16" in attend.ways(case.plan().layouts, **options_of(case))
        case.q = case.q.float()
        assert "unpacked to bfloat16" not in attend.ways(case.plan().layouts, **options_of(case))


def test_raw_pages_that_bfloat16_would_round_are_not():
    case = chunk("raw")
    layouts = [dataclasses.replace(x, raw_dtype="float16") for x in case.plan().layouts]
    assert "unpacked to bfloat16" not in attend.ways(layouts, **options_of(case))


@pytest.mark.parametrize("tiles", TILE_TIERS)
def test_tiles_of_one_term_are_a_way_where_they_save_terms(tiles):
    before = library.tier()
    library.set_tier(tiles)
    try:
        for name, saves in (("raw", True), ("int8_centered", True), ("int4", False), ("klt4", False)):
            case = chunk(name)
            options = options_of(case)
            assert ("one term" in attend.ways(case.plan().layouts, **options)) == saves
            assert list(attend.ways(case.plan().layouts, **options | {"sliding_window": 100})) == ["kernels"]
            case.q = case.q.float()
            assert "one term" not in attend.ways(case.plan().layouts, **options_of(case))
    finally:
        library.set_tier(before)


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": 100}, {"softcap": 20.0}, {"past_only": False}, {"num_queries": 1}, {"num_queries": 31}],
)
def test_what_torch_does_not_compute_is_left_to_the_kernels(changes):
    case = chunk()
    assert list(attend.ways(case.plan().layouts, **options_of(case, **changes))) == ["kernels"]


def test_short_histories_are_not_measured(folder):
    plan, found = attended(case := chunk(held=500))
    assert not folder.exists() and f"{autotune.TOKENS:,} tokens" in plan.explain()
    assert_close(found, case.exact(), NOISE["int4"])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seconds": {"kernels": "fast"}}', '{"seconds": {"other": 1}}'])
def test_files_that_hold_no_measurement_are_replaced(folder, text):
    attended(case := chunk())
    ((path, whole),) = files(folder).items()
    path.write_text(text)
    attended(case)
    assert set(json.loads(path.read_text())["seconds"]) == set(json.loads(whole)["seconds"])


@pytest.mark.parametrize("tier", TILE_TIERS)
def test_decoding_is_in_tiles_where_they_are_faster(folder, tier):
    """On a machine that is not measured AVX-512 serves."""
    before = library.tier()
    library.set_tier(tier)
    try:
        case = chunk(tokens=1)
        plan = case.plan(past_only=True)
        plan.bind(0, case.stores)
        assert mentions(plan.explain(), 32, "query rows")
        attended(case)
        ((path, text),) = files(folder).items()
        for way, served in (("tiles", f"attend by cpu ({tier});"), ("kernels", "attend by cpu (")):
            kept = json.loads(text)
            kept["seconds"][way] /= 1e6
            path.write_text(json.dumps(kept))
            plan, found = attended(case)
            assert plan.explain().startswith(served) and (tier + ": fewer" in plan.explain()) == (way == "kernels")
            assert_close(found, case.exact(), NOISE["int4"])
    finally:
        library.set_tier(before)
