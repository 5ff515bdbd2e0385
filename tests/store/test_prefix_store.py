"""Store that gives back what was put, byte for byte; it sets anything else aside by name, and the cache computes that
again.
"""

import dataclasses
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cache_checks import check_books, picture, poison_free_pages
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from random_cases import examples
from store_checks import FULL, SLIDING, bytes_of, cache_of, extend, ids_of, pieces, spec_of

from kvbits import PrefixStore
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, PoolFullError, SpecError
from kvbits.units import human_bytes

INT4 = spec_of("int4")


@pytest.fixture
def store(tmp_path):
    return PrefixStore(tmp_path, blob_tokens=64)


def test_a_read_only_store_loads_and_says_what_cannot_be_done(store, monkeypatch):
    ids = ids_of(300)
    donor = cache_of(INT4, ids)
    store.put(donor, ids)
    real = {name: getattr(os, name) for name in ("open", "mkdir", "utime", "unlink", "rename")}

    def refusing(name):
        def call(path, *args, **options):
            if name != "open" or args[0] & os.O_CREAT:
                if name == "mkdir" and Path(path).exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return real[name](path, *args, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, refusing(name))
    assert store.load(cache_of(INT4), ids) == 300
    other = cache_of(INT4, ids_of(300, 1))
    for what in (lambda: store.put(other, ids_of(300, 1)), lambda: store.pin(donor, ids), lambda: store.evict(0)):
        with raises(OSError, "put", "pin", "evict", "loading"):
            what()


@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("name", ["int4", "kivi2", "raw", "int8_centered", "fp8", "tiered", "klt2", "token_local"])
def test_exactly_the_tokens_that_were_put_load_as_exactly_the_cache_that_was_put(store, name, windows):
    spec, static = pieces(name, (FULL, SLIDING, FULL) if windows else (FULL, FULL))
    ids = ids_of(413)
    donor = cache_of(spec, ids, 400, static=static)
    assert store.put(donor, ids) == 400
    loaded = cache_of(spec, static=static)
    assert store.match(loaded, ids) == 400
    assert store.load(loaded, ids) == 400
    assert bytes_of(loaded) == bytes_of(donor)
    check_books(loaded)
    poison_free_pages(loaded)
    for cache in (donor, loaded):
        extend(cache, ids, 413, chunk=7)
    assert bytes_of(loaded) == bytes_of(donor)


@pytest.mark.parametrize("name", ["int4", "kivi2", "raw", "int8_centered", "fp8", "tiered", "klt2", "token_local"])
def test_another_prompt_with_the_same_beginning_loads_what_a_crop_of_the_first_would_be(store, name):
    spec, static = pieces(name)
    ids, other = ids_of(400), ids_of(400, seed=1)
    other[:330] = ids[:330]
    donor = cache_of(spec, ids, static=static)
    store.put(donor, ids)
    loaded = cache_of(spec, static=static)
    n = store.load(loaded, other)
    tiers = sum(tier.num_tokens for tier in spec.scheme.tiers)  # whose pages belong to the whole sequence
    assert n == spec.scheme.num_sink_tokens + 320 - tiers
    check_books(loaded)
    donor.crop(n)
    assert not any(n for g in donor.groups for s in g.sequences for n in s.young)
    assert bytes_of(loaded, copies=False) == bytes_of(donor, copies=False)
    # copies belong to the whole sequence: the beginning is read packed until new ones come
    assert not any(c for g in loaded.groups for s in g.sequences for c in s.copies)
    extend(loaded, other, 400)
    assert all(any(s.copies) for g in loaded.groups for s in g.sequences if g.group.copies)
    assert store.put(loaded, other) == 400
    again = cache_of(spec, static=static)
    assert store.load(again, other) == 400
    assert bytes_of(again) == bytes_of(loaded)


def test_layers_with_windows_load_a_shared_beginning_where_their_pages_were_put_in_time(tmp_path):
    spec, _ = pieces("int4", (FULL, SLIDING))
    ids, other = ids_of(400), ids_of(400, seed=1)
    other[:330] = ids[:330]
    late, early = PrefixStore(tmp_path / "late", blob_tokens=64), PrefixStore(tmp_path / "early", blob_tokens=64)
    donor = cache_of(spec)
    for upto in range(32, 401, 32):
        extend(donor, ids, min(upto, 400))
        early.put(donor, ids, end=False)
    late.put(donor, ids)
    loaded = cache_of(spec)
    assert late.load(loaded, other) == 0, "the window's pages before the shared end were gone when it was put"
    n = early.load(loaded, other)
    assert n == 324
    check_books(loaded)
    fresh = extend(cache_of(spec), ids, 324, 32)
    k, v = loaded.dequantize(1, 0)
    assert len(k) >= 99
    assert torch.isfinite(k).all()
    whole = cache_of(spec, ids, 345, chunk=32)
    for got, want in zip((k, v), whole.dequantize(1, 0), strict=True):
        last = len(want) - 21  # tokens up to 324, quantized as the longer sequence has them
        assert torch.equal(got[-60:], want[last - 60 : last])
    assert fresh.seq_lens == loaded.seq_lens


@pytest.mark.parametrize("name", ["int4", "raw", "token_local"])
@pytest.mark.parametrize(
    ("end", "speculates", "chunks"),
    [(False, False, (400,)), (True, True, (400,)), (True, False, (287, 400)), (True, False, (400,))],
)
def test_what_put_says_is_what_loads(store, name, end, speculates, chunks):
    spec, _ = pieces(name, (FULL, SLIDING))
    ids, donor = ids_of(400), cache_of(spec)
    for upto in chunks:
        extend(donor, ids, upto, chunk=upto)
        if speculates:
            donor.keep_past()
        said = store.put(donor, ids[:upto], end=end)
    assert said == store.load(cache_of(spec), ids)
    if end and not speculates:
        assert said == 400


@pytest.mark.parametrize("wait", [True, False])
def test_no_file_stays_open(store, wait):
    ids = ids_of(300)
    donor = cache_of(INT4, ids)
    before = len(os.listdir("/proc/self/fd"))
    store.put(donor, ids)
    cache = cache_of(INT4)
    assert store.load(cache, ids, wait=wait) == 300
    cache.arrivals.wait_for_all()
    for thread in threading.enumerate():
        if thread.name.startswith("kvbits-"):
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


def test_prompts_that_share_nothing_or_too_little_load_nothing(store):
    ids = ids_of(300)
    store.put(cache_of(INT4, ids), ids, end=False)
    for other in (ids_of(300, 1), ids[:67], ids[1:], ids[:0]):
        assert store.load(cache_of(INT4), other) == 0
    assert store.load(cache_of(INT4), ids[:68]) == 68
    assert store.load(cache_of(INT4), torch.from_numpy(ids)[None]) == 260


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("layers", "short", "long", "load"),
    [((FULL, SLIDING), 2, 300, 120), ((FULL, FULL), 130, 300, 130)],
    ids=["windows", "raw end"],
)
def test_pages_of_a_blob_that_the_plan_leaves_out_are_not_taken_for_those_of_its_end(
    store, layers, short, long, load, wait
):
    """Both were the blob of one number: in a cache with room, where reading begins early, a sequence got page ids of
    another pool.
    """
    spec = spec_of("int4", layers, residual_length=64, num_sink_tokens=0)
    ids = ids_of(long)
    for n in (short, long):
        store.put(cache_of(spec, ids[:n]), ids[:n])
    cache = cache_of(spec, batch_size=1, max_tokens=400)
    assert store.load(cache, ids[:load], wait=wait) == short
    check_books(cache)
    assert bytes_of(cache) == bytes_of(cache_of(spec, ids[:short]))


@pytest.mark.parametrize("layers", [(FULL, FULL), (FULL, SLIDING)], ids=["full", "windows"])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 400}], ids=["grows", "fixed"])
def test_exactly_the_tokens_that_were_put_load_as_they_were_though_a_longer_prompt_closed_all_of_them(
    store, layers, options
):
    """At the border of a blob: the closed pages alone would have quantized the newest tokens."""
    spec = spec_of("int4", layers, num_sink_tokens=0)
    ids = ids_of(300)
    for n in (300, 128):
        store.put(cache_of(spec, ids[:n]), ids[:n])
    cache = cache_of(spec, **options)
    assert store.load(cache, ids[:128]) == 128
    assert bytes_of(cache) == bytes_of(cache_of(spec, ids[:128]))
    check_books(cache)


@given(st.integers(1, 200), st.integers(0, 60), st.sampled_from(["int4", "raw", "int8_centered", "token_local"]))
@examples(15)
def test_any_length_goes_through_a_store(tmp_path_factory, n, more, name):
    spec, _ = pieces(name)
    ids = ids_of(n + more)
    store = PrefixStore(tmp_path_factory.mktemp("store"), blob_tokens=32)
    donor = cache_of(spec, ids, n)
    assert store.put(donor, ids) == n
    loaded = cache_of(spec)
    assert store.load(loaded, ids) == n
    assert bytes_of(loaded) == bytes_of(donor)


def test_what_is_there_is_not_written_again_and_equal_prefixes_are_stored_once(store):
    ids, other = ids_of(400), ids_of(400, 1)
    other[:200] = ids[:200]
    store.put(cache_of(INT4, ids), ids)
    names = {e.name: e.nbytes for e in store.folder.entries()}
    store.put(cache_of(INT4, ids), ids)
    assert {e.name: e.nbytes for e in store.folder.entries()} == names
    store.put(cache_of(INT4, other), other)
    assert len(list(store.folder.entries())) == len(names) + 3, "two blobs and the end are new, three are shared"


@pytest.mark.parametrize("change", ["model", "scheme", "calibration", "dtype"])
def test_what_another_model_scheme_or_calibration_made_is_not_found(store, change):
    static = [{"k_scale": torch.full((2, 1), 0.1), "v_scale": torch.full((2, 1), 0.1)} for _ in range(2)]
    spec, ids = spec_of("int8_static", residual_length=0), ids_of(300)
    store.put(cache_of(spec, ids, static=static), ids)
    assert store.match(cache_of(spec, static=static), ids) == 300
    if change == "calibration":
        static[1]["v_scale"] = torch.full((2, 1), 0.2)
    if change == "scheme":
        spec = spec_of("int8_static", residual_length=32)
    if change == "dtype":
        spec = dataclasses.replace(spec, raw_dtype="bfloat16")
    other = cache_of(spec, static=static)
    if change == "model":
        other.made_for = "another"
    assert store.match(other, ids) == 0


def test_sequences_that_were_cropped_into_a_page_or_lost_one_store_what_is_whole(store, tmp_path):
    ids = ids_of(400)
    donor = cache_of(INT4, ids)
    donor.crop(300)
    assert store.put(donor, ids) == 260, "a crop into a page is not what 300 tokens make"
    extend(donor, ids, 400)
    assert store.put(donor, ids[:400]) in (0, 260), "pages behind the crop lie elsewhere than those of other sequences"
    dropped = cache_of(INT4, ids)
    dropped.drop_pages(0, [[4 + 32 * 5]])
    assert PrefixStore(tmp_path / "other", blob_tokens=64).put(dropped, ids) == 4 + 128


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        ([[1], [2, 3]], ("[tokens]", "[1, tokens]", "lists of different lengths")),
        (torch.ones(3).bfloat16(), ("[tokens]", "[1, tokens]", "torch.bfloat16")),
        (torch.ones(3, device="meta"), ("[tokens]", "[1, tokens]", "meta")),
        (np.full(300, 2**63, np.uint64), (9223372036854775808, "2**63 - 1")),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path, ids, parts):
    store = PrefixStore(tmp_path)
    for call in (store.load, store.match):
        with raises(DataError, *parts):
            call(cache_of(INT4), ids)
    largest = np.full(100, 2**63 - 1, np.uint64)
    assert store.match(cache_of(INT4), largest) == 0


@pytest.mark.parametrize("where", [None, 5, "", b"/tmp/x"])
def test_a_place_that_is_none_is_refused(where):
    with raises(SpecError, repr(where), "folder", "s3://"):
        PrefixStore(where)


def test_bad_calls_are_refused_in_words(tmp_path):
    store, ids = PrefixStore(tmp_path), ids_of(100)
    cache = cache_of(INT4, ids)
    with raises(DataError, "50 token ids", "100 tokens"):
        store.put(cache, ids[:50])
    with raises(DataError, "sequence 3", "holds 1"):
        store.put(cache, ids, row=3)
    with raises(DataError, "[tokens]", "[1, tokens]", "float64", "[2]"):
        store.put(cache, [0.5, 1])
    with raises(DataError, "[tokens]", "[1, tokens]", "int64", "[2, 3]"):
        store.put(cache, np.zeros((2, 3), np.int64))
    with raises(CacheStateError, "sequence 0", "100 tokens", "free(0)"):
        store.load(cache, ids)
    with raises(DataError, "str", "KVCache", "PagedCache"):
        store.put("cache", ids)
    with raises(SpecError, "cache.made_for"):
        store.match(PagedCache(INT4), ids)
    with raises(DataError, "blob_tokens=0", 1):
        PrefixStore(tmp_path, blob_tokens=0)
    with raises(SpecError, "max_bytes", "'12 lightyears'", "75GB"):
        PrefixStore(tmp_path, max_bytes="12 lightyears")
    with raises(SpecError, "max_bytes"):
        store.evict()
    (tmp_path / "file").write_text("")
    with raises(SpecError, tmp_path / "file", "folder"):
        PrefixStore(tmp_path / "file")
    cache.begin(1, 3)
    with raises(CacheStateError, "reset()", "abandon()"):
        store.put(cache, ids)


def test_a_cache_without_room_is_left_as_it_was(store):
    ids = ids_of(400)
    store.put(cache_of(INT4, ids), ids)
    small = cache_of(INT4, batch_size=1, max_tokens=200)
    store.load(small, ids[:3])
    before = picture(small)
    with pytest.raises(PoolFullError):
        store.load(small, ids)
    assert picture(small) == before
    rows = cache_of(INT4, batch_size=2, max_tokens=500)
    for layer in range(2):
        rows.append(layer, torch.zeros(2, 1, 2, 32), torch.zeros(2, 1, 2, 32))
    rows.free(1)
    assert store.load(rows, ids, row=1) == 400
    assert rows.seq_lens == [1, 400]


def test_prefixes_load_into_the_rows_of_a_new_cache_in_any_order(tmp_path):
    store, prompts = PrefixStore(tmp_path, blob_tokens=64), [ids_of(150, seed) for seed in range(3)]
    donors = [cache_of(INT4, ids) for ids in prompts]
    for donor, ids in zip(donors, prompts, strict=True):
        store.put(donor, ids)
    cache = cache_of(INT4, max_tokens=200, batch_size=3)
    for row in (1, 0, 2):
        assert store.load(cache, prompts[row], row) == 150
    assert [bytes_of(cache, row) for row in range(3)] == [bytes_of(donor) for donor in donors]
    with raises(DataError, "sequence 3", "holds 3"):
        store.load(cache, prompts[0], 3)


def test_sizes_are_read_as_people_write_them(tmp_path):
    for size, nbytes in (
        (7, 7),
        ("7B", 7),
        ("64 MB", 64 * 10**6),
        ("1.5gb", 15 * 10**8),
        ("2TB", 2 * 10**12),
        ("1kb", 1000),
        ("1GiB", 2**30),
    ):
        assert PrefixStore(tmp_path, max_bytes=size).max_bytes == nbytes
    for bad in (-1, 1.5, "", "64", "GB", "-1GB", "infGB", "1e400GB", "1XB"):
        with raises(SpecError, "max_bytes", "75GB"):
            PrefixStore(tmp_path, max_bytes=bad)
    with raises(SpecError, "max_bytes=0", "None"):
        PrefixStore(tmp_path, max_bytes=0)


# -- what stays
# ---------------------------------------------------------------------------------------------------------


def aged(store, seconds):
    """Make every file look unused for so long."""
    for e in list(store.folder.entries()):
        store.folder.use(e.namespace, e.name, e.used - int(seconds * 1e9))


def test_what_was_used_least_lately_leaves_first_and_the_end_of_a_prefix_before_its_beginning(store):
    prompts = [ids_of(400, seed) for seed in range(3)]
    for ids in prompts:
        store.put(cache_of(INT4, ids), ids)
        aged(store, 10)
    store.load(cache_of(INT4), prompts[0])  # used again
    one = store.nbytes // 3
    assert store.evict(2 * one + one // 2) > 0
    assert [store.match(cache_of(INT4), ids) for ids in prompts][::2] == [400, 400]
    assert 0 < store.match(cache_of(INT4), prompts[1]) < 400
    store.evict(0)
    assert store.nbytes == 0
    assert store.load(cache_of(INT4), prompts[0]) == 0


def test_a_pinned_prefix_stays(store, tmp_path):
    kept, other = ids_of(400), ids_of(400, 1)
    with raises(DataError, "400 tokens", "put"):
        store.pin(cache_of(INT4), kept)
    for ids in (kept, other):
        store.put(cache_of(INT4, ids), ids)
    assert store.pin(cache_of(INT4), kept) == 400
    PrefixStore(tmp_path).evict(0)  # another process
    assert store.match(cache_of(INT4), kept) == 400
    assert store.match(cache_of(INT4), other) == 0
    assert store.unpin(cache_of(INT4), kept)
    assert not store.unpin(cache_of(INT4), kept)
    store.evict(0)
    assert store.match(cache_of(INT4), kept) == 0


def test_put_keeps_the_store_below_its_size(tmp_path):
    ids = ids_of(400)
    store = PrefixStore(tmp_path, blob_tokens=64, max_bytes=10**9)
    store.put(cache_of(INT4, ids), ids)
    one = store.nbytes
    store = PrefixStore(tmp_path, blob_tokens=64, max_bytes=3 * one)
    for seed in range(1, 8):
        more = ids_of(400, seed)
        store.put(cache_of(INT4, more), more)
        assert store.nbytes <= 3 * one + one // 4
        assert store.match(cache_of(INT4), more) == 400, "the newest stays"


def test_explain_counts_files_and_bytes(store, tmp_path):
    ids = ids_of(400)
    store.put(cache_of(INT4, ids), ids)
    about = store.explain()
    assert about["files"] == 6
    assert about["bytes"] == store.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert len(about["namespaces"]) == 1
    assert repr(store).startswith("PrefixStore(")
    (namespace,) = about["namespaces"]
    assert str(about).splitlines() == [
        f"{tmp_path}: 6 files, {human_bytes(about['bytes'])}",
        f"{namespace}: 6 files, {human_bytes(about['bytes'])}",
        "one line for each model, scheme and calibration, whose pages are never mixed",
    ]


@pytest.mark.parametrize("where", ["/proc/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_made_says_so(where):
    with raises(SpecError, where, "folder"):
        PrefixStore(where)


@pytest.mark.parametrize("name", ["tiered", "int8_centered", "raw"])
def test_a_parked_sequence_comes_back_as_it_was_and_is_not_evicted_meanwhile(store, name):
    spec, _ = pieces(name)
    ids, others = ids_of(400), ids_of(300, seed=1)
    donor = cache_of(spec, ids, batch_size=1, max_tokens=420)
    before, whole = bytes_of(donor), donor.explain()["bytes"]
    assert store.park(donor, ids) == whole["total"] - whole["free"] > 0
    assert donor.seq_lens == [0]
    assert donor.explain()["bytes"]["free"] == whole["total"]
    poison_free_pages(donor)
    store.put(cache_of(spec, others), others)
    store.evict(0)
    assert store.resume(donor, ids) == 400
    assert bytes_of(donor) == before
    assert donor.explain()["bytes"] == whole
    store.evict(0)
    assert store.match(donor, ids) == 0, "it is not pinned any more"


def test_a_prefix_is_loaded_into_pages_alone(store):
    """A cache of Transformers has pages, but counts the columns of its prompts, too."""
    kv = SimpleNamespace(pages=cache_of(INT4))
    with raises(DataError, "load()", "SimpleNamespace", "PagedCache", "KVCache.from_prefix(model, ids, store=store)"):
        store.load(kv, ids_of(300))


def test_what_could_not_come_back_is_not_parked(store):
    spec, _ = pieces("int8_centered")
    ids = ids_of(400)
    cropped = cache_of(spec, ids)
    cropped.crop(290)
    before = bytes_of(cropped)
    for cache, named in ((cropped, ids[:290]), (cache_of(spec, ids, 64), ids)):
        if cache is not cropped:
            cache.crop(0)
        with raises(CacheStateError, "sequence 0", "swap_out(0)"):
            store.park(cache, named)
    assert bytes_of(cropped) == before


def test_resume_lets_go_of_the_pin_whatever_ids_follow_and_whatever_was_lost(store, tmp_path):
    ids = ids_of(410)
    cache = cache_of(INT4, ids, 400)
    store.park(cache, ids)
    assert store.resume(cache, ids) == 400
    assert store.evict(0) > 0
    assert store.explain()["files"] == 0
    store.park(cache, ids[:400])
    next(p for p in tmp_path.rglob("*+*")).unlink()
    assert store.resume(cache, ids[:400]) == 324
    store.evict(0)
    assert store.explain()["files"] == 0


@pytest.mark.parametrize("keep", [0, 60_000], ids=["all", "its end"])
def test_what_somebody_evicts_meanwhile_is_not_parked_and_not_pinned(store, tmp_path, monkeypatch, keep):
    ids = ids_of(400)
    cache = cache_of(INT4, ids)
    before, put = bytes_of(cache), PrefixStore.put

    def put_and_lose(self, *args, **options):
        stored = put(self, *args, **options)
        PrefixStore(tmp_path).evict(keep)
        return stored

    monkeypatch.setattr(PrefixStore, "put", put_and_lose)
    with raises(CacheStateError, "sequence 0", "400 tokens", "swap_out(0)"):
        store.park(cache, ids)
    assert bytes_of(cache) == before
    assert (store.nbytes > 0) == (keep > 0)
    assert not [p for p in tmp_path.rglob("*.pin")]


def test_prompts_of_equal_ids_and_other_extra_share_nothing(store):
    ids = ids_of(400)
    cache = cache_of(INT4, ids)
    assert store.put(cache, ids, extra=b"image a") == 400
    assert store.match(cache, ids, extra=b"image a") == 400
    assert store.match(cache, ids) == store.match(cache, ids, extra=b"image b") == 0
    empty = cache_of(INT4)
    assert store.load(empty, ids, extra=b"image b") == 0 and store.load(empty, ids, extra=b"image a") == 400
    assert store.park(cache, ids, extra=b"image a") >= 0
    with raises(DataError, "400 tokens", "put"):
        store.pin(cache, ids)
    assert not store.unpin(cache, ids) and store.resume(cache, ids, extra=b"image a") == 400
    assert bytes_of(cache) == bytes_of(empty)
