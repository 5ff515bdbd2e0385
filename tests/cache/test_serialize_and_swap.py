"""Saved files and swapped sequences come back byte for byte; anything else is refused in words."""

import copy
import dataclasses
import json
import os
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_checks import Pair, check_books, check_values, drop_pass, picture, poison_free_pages
from hypothesis import given
from hypothesis import strategies as st
from messages import raises
from ops.cpu_cases import static_params

from kvbits import schemes
from kvbits.cache import blob, pool
from kvbits.cache.blob import Header, Kind, Table
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, FileFormatError, PoolFullError, SpecError
from kvbits.ops.reference.dequantize import section
from kvbits.spec import CacheSpec, LayerGeometry, PerGroup, QuantSpec, Rotary

FULL = LayerGeometry(num_kv_heads=2, head_dim=64)
SLIDING = dataclasses.replace(FULL, sliding_window=50)


def small_spec(name="int4", **changes):
    scheme = schemes.get(name, **({"residual_length": 16, "page_size": 32, "num_sink_tokens": 4} | changes))
    return CacheSpec(scheme=scheme, layers=(FULL, SLIDING, FULL), raw_dtype="float32")


def busy_pair(spec=None, static=None, **capacity) -> Pair:
    """Three rows: two share pages, one of them went on alone, one was cropped into a closed page."""
    spec = spec or small_spec()
    pair = Pair(PagedCache(spec, static=static, backend="reference", **capacity), attend=False)
    valid = torch.ones(2, 120, dtype=torch.bool)
    valid[1, :33] = False
    pair.append(2, 120, valid)
    pair.cache.fork(0)
    pair.model.rows.append(pair.model.clone_row(0))
    pair.append(3, 1)
    pair.cache.keep_past()
    pair.model.keep_past()
    pair.append(3, 30)
    lengths = [pair.cache.seq_lens[0], 90, 130]
    pair.cache.crop(lengths)
    pair.model.crop(lengths)
    return pair


def test_outliers_outside_of_their_page_are_refused(tmp_path):
    """Attention leaves them out; whoever looks at the numbers is told."""
    spec = small_spec("nuq3-1%", num_sink_tokens=0, page_size=32)
    layers = tuple(dataclasses.replace(g, rotary=Rotary(inv_freq=(0.1,) * 32)) for g in spec.layers)
    spec = dataclasses.replace(spec, layers=layers)
    static = [static_params(spec.scheme.key, spec.scheme.value, 2, 64) for _ in spec.layers]
    cache = PagedCache(spec, static=static, backend="reference")
    for layer in range(3):
        cache.append(layer, *torch.randn(2, 1, 100, 2, 64))
    pools = cache.groups[0].pools
    section(pools["closed"].block(0), pools["closed"].layout, "v_outlier_index").fill_(-1)
    cache.save(tmp_path / "cache")
    with raises(DataError, "outlier", 2048):
        PagedCache.load(tmp_path / "cache").dequantize(0, 0)


def pages_by_row(cache):
    """Bytes of every page, as each sequence lists them, and which are shared."""
    found = []
    for g in cache.groups:
        ranks = {
            name: {i: n for n, i in enumerate(dict.fromkeys(i for s in g.sequences for i in s.pages()[name]))}
            for name in g.pools
        }
        for s in g.sequences:
            ids = [tuple(ranks[name][i] for i in held) for name, held in s.pages().items()]
            codes = [g.pools["closed"].block(i).numpy().tobytes() for i in s.closed]
            found.append((s.length, s.released, s.closed_lengths, s.tail_lengths, *ids, *codes))
    return found


@pytest.fixture
def saved(tmp_path):
    pair = busy_pair()
    path = tmp_path / "cache.safetensors"
    pair.cache.save(path)
    return pair, path


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8_static", "kivi2", "raw", "fp8_e5m2_keys", "klt2"])
@pytest.mark.parametrize("capacity", [{}, {"batch_size": 3, "max_tokens": 200}])
def test_a_loaded_cache_is_byte_identical_shares_the_same_pages_and_goes_on(name, capacity, tmp_path):
    spec = small_spec(name)
    static = None
    if name == "klt2":
        spec = dataclasses.replace(
            spec,
            layers=tuple(
                dataclasses.replace(g, rotary=Rotary(inv_freq=tuple(10_000.0 ** (-i / 32) for i in range(32))))
                for g in spec.layers
            ),
        )
        static = [static_params(spec.scheme.key, spec.scheme.value, 2, 64) for _ in range(3)]
    if name == "int8_static":
        static = [{"k_scale": torch.rand(2, 1) + 0.01, "v_scale": torch.rand(2, 1) + 0.01} for _ in range(3)]
    pair = busy_pair(spec, static, **capacity)
    pair.cache.save(tmp_path / "a")
    loaded = PagedCache.load(tmp_path / "a", backend="reference")
    assert loaded.spec == spec
    assert pages_by_row(loaded) == pages_by_row(pair.cache)
    check_values(loaded, pair.model)
    check_books(loaded)
    assert loaded.saturated == pair.cache.saturated
    if capacity:
        assert loaded.nbytes == pair.cache.nbytes
    if static:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(loaded.static, static, strict=True) for n in a)
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    pair.cache = loaded
    pair.append(3, 40)
    pair.append(3, 1)
    pair.check()


def test_a_loaded_cache_that_is_full_says_what_it_was_built_for_and_can_be_loaded_to_grow(tmp_path):
    pair = busy_pair(batch_size=3, max_tokens=200)
    path = tmp_path / "cache"
    pair.cache.save(path)
    loaded = PagedCache.load(path, backend="reference")
    with raises(PoolFullError, "3 sequences", "200 tokens", "151 tokens", "3 x 400", "load(.., grow=True)"):
        loaded.begin(3, 400)
    pair.cache = PagedCache.load(path, backend="reference", grow=True)
    pair.model.fixed = False
    pair.append(3, 400)
    pair.check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_reads_its_kv_heads_of_a_file(ranks, tmp_path):
    spec = small_spec("int8_static")
    static = [{"k_scale": torch.rand(2, 1) + 0.01, "v_scale": torch.rand(2, 1) + 0.01} for _ in range(3)]
    whole = busy_pair(spec, static, batch_size=3, max_tokens=200).cache
    whole.saturated[1]["k"] = 7
    whole.save(tmp_path / "a")
    for rank in range(ranks):
        part = PagedCache.load(tmp_path / "a", backend="reference", shard=(rank, ranks))
        assert {g.num_kv_heads for g in part.spec.layers} == {2 // ranks} and part.built_for == whole.built_for
        assert [s["k"] for s in part.saturated] == [0, 0 if rank else 7, 0]
        check_books(part)
        heads = slice(rank * 2 // ranks, (rank + 1) * 2 // ranks)
        for layer in range(3):
            for row in range(3):
                for mine, x in zip(part.dequantize(layer, row), whole.dequantize(layer, row), strict=True):
                    assert torch.equal(mine, x[:, heads])
    with raises(FileFormatError, "2 kv heads", "3 ranks"):
        PagedCache.load(tmp_path / "a", shard=(0, 3))


def test_an_empty_cache_round_trips(tmp_path):
    cache = PagedCache(small_spec())
    cache.save(tmp_path / "empty")
    assert PagedCache.load(tmp_path / "empty").seq_lens == []


def test_a_file_is_blobs_one_after_the_other_and_any_program_can_walk_them(saved):
    pair, path = saved
    data, at, kinds, pages = path.read_bytes(), 0, [], 0
    while at < len(data):
        header = Header.parse(data[at:], "the file")
        kinds.append(header.kind)
        pages += header.pages
        assert at % 64 == 0
        at += header.nbytes
    assert at == len(data)
    assert kinds[0] == Kind.ABOUT
    assert set(kinds[1:]) == {Kind.PART, Kind.END}
    assert kinds.count(Kind.END) == 3
    assert pages == sum(p.allocator.num_used for g in pair.cache.groups for p in g.pools.values())


def test_stale_bytes_of_raw_pages_do_not_reach_the_file(tmp_path):
    pair = Pair(PagedCache(small_spec("raw", num_sink_tokens=0), backend="reference"), attend=False)
    pair.append(1, 32)
    pair.cache.crop(3)
    pair.cache.save(tmp_path / "a")
    blobs = list(blobs_of(tmp_path / "a"))[1:]
    data = np.frombuffer(b"".join(x[128 + Header.parse(x, "").table_bytes :] for x in blobs), np.float32)
    assert int((data != 0).sum()) == 3 * 2 * 2 * 3 * 64  # layers, heads, K and V, tokens, channels


@given(st.integers(0, 10**9))
def test_every_truncated_file_is_refused(cut):
    path = _shared_file()
    data = path.read_bytes()
    short = path.with_name("short")
    short.write_bytes(data[: cut % len(data)])
    with raises(FileFormatError, "short", "truncated"):
        PagedCache.load(short)


@given(st.integers(0, 10**9), st.integers(0, 7))
def test_every_flipped_bit_is_refused_or_lies_outside_what_is_read(position, bit):
    path = _shared_file()
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    bad = path.with_name("flipped")
    bad.write_bytes(data)
    with pytest.raises(FileFormatError):
        PagedCache.load(bad)


_FILE = []


def _shared_file() -> Path:
    if not _FILE:
        import tempfile

        directory = tempfile.TemporaryDirectory()
        pair = busy_pair()
        pair.cache.save(Path(directory.name) / "cache")
        _FILE.append(directory)
    return Path(_FILE[0].name) / "cache"


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100, b"\xff" * 100, b"PK\x03\x04" + bytes(500)])
def test_foreign_bytes_are_refused(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with raises(FileFormatError, tmp_path / "x", "copy"):
        PagedCache.load(tmp_path / "x")


def test_a_missing_file_is_missing(tmp_path):
    with raises(FileFormatError, "nowhere", "cache.save"):
        PagedCache.load(tmp_path / "nowhere")


def test_another_version_is_refused_with_both_versions(saved, monkeypatch):
    _, path = saved
    monkeypatch.setattr(blob, "FORMATS_VERSION", 7)
    with raises(FileFormatError, "formats_version 2", 7):
        PagedCache.load(path)
    monkeypatch.undo()
    ours = blob.BLOB_VERSION
    monkeypatch.setattr(blob, "BLOB_VERSION", ours + 1)
    with raises(FileFormatError, f"blob_version {ours}", ours + 1):
        PagedCache.load(path)


def test_another_spec_than_the_expected_one_is_refused_by_field(saved):
    pair, path = saved
    assert PagedCache.load(path, spec=pair.cache.spec).seq_lens == pair.cache.seq_lens
    with raises(FileFormatError, "'int4'", "3 layers", "'int8'", "scheme", "spec=None"):
        PagedCache.load(path, spec=small_spec("int8"))


def blobs_of(path):
    """The blobs of a file, as bytes."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        n = Header.parse(data[at:], "the file").nbytes
        yield data[at : at + n]
        at += n


def rewritten(path, change):
    """The file with the description of its cache, or that of its first sequence, changed, and its checksums right."""
    blobs = list(blobs_of(path))
    ends = [i for i, x in enumerate(blobs) if Header.parse(x, "the file").kind == Kind.END]
    header, last = (Header.parse(blobs[i], "the file") for i in (0, ends[0]))
    about = json.loads(blobs[0][128:].rstrip(b"\0"))
    rest = blobs[ends[0]][128 + last.table_bytes :]
    table = blobs[ends[0]][128 : 128 + last.table_bytes]
    at = table.index(b'{"groups"')
    about["state"] = json.loads(table[at:])
    text = change(about)
    state = about.pop("state")
    if isinstance(text, bytes):
        whole, state = text, json.dumps(state).encode()
    else:
        whole, state = json.dumps(about).encode(), text(state) if callable(text) else json.dumps(state).encode()
    table = table[:at] + state
    table += b" " * (-len(table) % 64)
    last = dataclasses.replace(last, table_bytes=len(table), table_crc=zlib.crc32(table))
    blobs[0] = b"".join(blob.encode_bytes(Kind.ABOUT, header.identity, whole))
    blobs[ends[0]] = last.pack() + table + rest
    bad = path.with_name("bad")
    bad.write_bytes(b"".join(blobs))
    return bad


def first_sequence(about):
    return about["state"]["groups"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: first_sequence(a)["closed"].__setitem__(0, 10**6),
        lambda a: first_sequence(a)["closed"].__setitem__(0, -1),
        lambda a: first_sequence(a)["closed_lengths"].__setitem__(0, 33),
        lambda a: first_sequence(a)["closed_lengths"].__setitem__(0, 0),
        lambda a: first_sequence(a)["closed_lengths"].pop(),
        lambda a: first_sequence(a)["tail"].pop(),
        lambda a: first_sequence(a).__setitem__("length", 10**6),
        lambda a: first_sequence(a).__setitem__("length", "many"),
        lambda a: first_sequence(a).__setitem__("sink", [0, 0]),
        lambda a: first_sequence(a).__setitem__("extra", 1),
        lambda a: a["groups"].pop(),
        lambda a: a["state"]["groups"].pop(),
        lambda a: a.__setitem__("sequences", 2),
        lambda a: a.__setitem__("sequences", 10**30),
        lambda a: a.__setitem__("sequences", True),
        lambda a: a["groups"][0]["capacity"].__setitem__("closed", 1),
        lambda a: a["spec"].__setitem__("raw_dtype", "bfloat16"),
        lambda a: a["spec"].__setitem__("type", "Scheme"),
        lambda a: a["spec"]["scheme"].__setitem__("page_size", 64),
        lambda a: a.pop("made_for"),
        lambda a: a.__setitem__("saturated", None),
        lambda a: a.__setitem__("built_for", [0, 5]),
        lambda a: a.__setitem__("built_for", "much"),
        lambda a: a.__setitem__("built_for", [1, 10**30]),
        lambda a: a.__setitem__("saturated", []),
        lambda a: a["saturated"][0].__setitem__("k", -1),
        lambda a: a["saturated"][0].__setitem__("k", 1.0),
        lambda a: a["spec"]["layers"][0].__setitem__("num_kv_heads", 10**12),
        lambda a: a["spec"]["layers"][0].__setitem__("num_kv_heads", 2.0),
        lambda a: a["spec"]["layers"][0].__setitem__("head_dim", 64.0),
        lambda a: a["spec"]["layers"][0].__setitem__("head_dim", 2**62),
        lambda a: a["spec"]["layers"][1].__setitem__("sliding_window", True),
        lambda a: a["spec"].__setitem__("layers", a["spec"]["layers"] * 10**5),
        lambda a: a["spec"]["scheme"].__setitem__("residual_length", 16.0),
        lambda a: a["spec"]["scheme"].__setitem__("page_size", 2**62),
        lambda a: first_sequence(a).__setitem__("length", first_sequence(a)["length"] + 10**30),
        lambda a: first_sequence(a).update(length=first_sequence(a)["length"] + 2**41, released=2**41),
        lambda a: first_sequence(a).update(length=first_sequence(a)["length"] + 10**6, released=10**6),
        lambda a: first_sequence(a).__setitem__("residual_length", 10**30),
        lambda a: first_sequence(a).__setitem__("residual_length", 16.0),
        lambda a: first_sequence(a).__setitem__("closed", {}),
        lambda a: first_sequence(a).__setitem__("young", [1] * 3),
        lambda a: a["groups"][0].__setitem__("keep_past", 1),
        lambda a: a["groups"][0]["capacity"].__setitem__("closed", 10**12),
        lambda a: a["groups"][0]["capacity"].__setitem__("closed", 10**30),
        lambda a: a["groups"][0]["capacity"].__setitem__("closed", 2**62),
        lambda a: a["groups"][0]["capacity"].__setitem__("closed", 50.0),
        lambda a: a.__setitem__("static", [[0, "k_scale", [2**62]]]),
        lambda a: a.__setitem__("made_for", 5),
        lambda a: b"[" * 10**5 + b"]" * 10**5,
        lambda a: lambda state: json.dumps(state).replace('"length": ', '"length": 1e999, "x": ').encode(),
        lambda a: lambda state: b"",
        lambda a: lambda state: b"NaN",
        lambda a: lambda state: b"[" * 10**5 + b"]" * 10**5,
        lambda a: b"NaN",
        lambda a: b"\xff\xfe",
        lambda a: b"3" * 5000,
    ],
)
def test_contents_that_cannot_be_are_refused_before_a_kernel_reads_them(saved, change):
    _, path = saved
    PagedCache.load(rewritten(path, lambda about: None))
    bad = rewritten(path, change)
    with raises(FileFormatError, bad, "save") as refusal:
        PagedCache.load(bad)
    assert "checksum" not in str(refusal.value)


def with_header(path, number, **changes):
    """The file with the header of one blob changed, and its CRC right."""
    blobs = list(blobs_of(path))
    header = dataclasses.replace(Header.parse(blobs[number], "the file"), **changes)
    blobs[number] = header.pack() + blobs[number][128:]
    bad = path.with_name("bad")
    bad.write_bytes(b"".join(blobs))
    return bad


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (0, {"data_bytes": 2**61}),
        (1, {"data_bytes": 2**61}),
        (1, {"data_bytes": 2**63}),
        (1, {"pages": 2**31}),
        (1, {"pages": 10**6}),
        (1, {"table_bytes": 2**32 - 64}),
        (1, {"table_bytes": 64}),
        (1, {"data_bytes": 0}),
        (1, {"kind": Kind.END}),
        (1, {"checksum": 1}),
        (0, {"checksum": 1}),
        (0, {"pages": 4}),
        (0, {"kind": Kind.PART}),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_read_by_them(saved, number, changes):
    _, path = saved
    with raises(FileFormatError, "bad"):
        PagedCache.load(with_header(path, number, **changes))


def test_blobs_that_overlap_come_twice_or_are_missing_are_refused(saved):
    pair, path = saved
    blobs = list(blobs_of(path))
    bad = path.with_name("bad")
    for wrong, parts in (
        (blobs + blobs[-1:], ("4 of 3 sequences", "copy")),
        (blobs[:2] + blobs[1:], ("column=0", "copy")),
        (blobs[:-1], ("truncated", "2 of 3 sequences", "copy")),
        ([blobs[0], *blobs[2:]], ("column=3", "copy")),
        ([blobs[0], *blobs[:0:-1]], ("column=3", "copy")),
    ):
        bad.write_bytes(b"".join(wrong))
        with raises(FileFormatError, bad, *parts):
            PagedCache.load(bad)
    header = Header.parse(blobs[1], "the file")
    table = Table.parse(
        header, blobs[1][128 : 128 + header.table_bytes], [g.group for g in pair.cache.groups], "the file"
    )
    with raises(FileFormatError, "table", "page twice"):
        text = Table([table.pages[0]] * len(table.pages), table.sums).pack()
        Table.parse(
            dataclasses.replace(header, table_crc=zlib.crc32(text)), text, [g.group for g in pair.cache.groups], "it"
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda a: first_sequence(a)["tail"].__setitem__(0, 10**6),
        lambda a: a["groups"][0]["capacity"].__setitem__("closed", 10**9),
    ],
)
def test_nothing_is_allocated_by_the_numbers_of_a_file_that_is_refused(saved, monkeypatch, change):
    _, path = saved
    bad = rewritten(path, change)
    monkeypatch.setattr(pool, "allocate_slab", lambda nbytes, device: pytest.fail(f"{nbytes} bytes were allocated"))
    with raises(FileFormatError, bad, "save"):
        PagedCache.load(bad)


def test_a_failed_save_leaves_the_old_file_and_no_litter(saved, monkeypatch):
    pair, path = saved
    before = path.read_bytes()
    pair.append(3, 5)

    def full_disk(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with raises(OSError, "No space left"):
        pair.cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_where_no_file_can_be_is_said_before_anything_is_written(tmp_path):
    cache = PagedCache(small_spec())
    (tmp_path / "folder").mkdir()
    with raises(SpecError, "save", "folder"):
        cache.save(tmp_path / "folder")
    with raises(SpecError, "nowhere"):
        cache.save(tmp_path / "nowhere" / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_saving_in_the_middle_of_a_forward_pass_is_refused(tmp_path):
    cache = PagedCache(small_spec(), backend="reference")
    cache.begin(1, 3)
    with raises(CacheStateError, "save", "3 layers"):
        cache.save(tmp_path / "x")
    with raises(CacheStateError, "swap_out"):
        cache.swap_out(0)
    assert not os.listdir(tmp_path)


# -- swap -------------------------------------------------------------------------------------------------------------


def test_swapping_out_frees_the_sequences_own_pages_and_back_in_is_byte_identical():
    pair = busy_pair(batch_size=3, max_tokens=200)
    cache = pair.cache
    before, used = pages_by_row(cache), cache.nbytes - cache.bytes_by_kind()["free"]
    rows = [cache.swap_out(row) for row in range(3)]
    assert cache.seq_lens == [0, 0, 0]
    assert cache.bytes_by_kind()["free"] == cache.nbytes
    assert [r.num_tokens for r in rows] == pair.model.seq_lens
    assert sum(r.nbytes for r in rows) >= used
    poison_free_pages(cache)
    for row in (2, 0, 1):
        cache.swap_in(row, rows[row])
    pair.check()
    closed = [x[7:] for x in before]
    assert [x[7:] for x in pages_by_row(cache)] == closed
    pair.append(3, 70)
    pair.append(3, 1)
    pair.check()


def test_a_shared_page_stays_with_those_who_share_it():
    pair = busy_pair()
    swapped = pair.cache.swap_out(0)
    model_row, pair.model.rows[0] = pair.model.rows[0], pair.model.new_row()
    pair.check()
    pair.append(3, 2)
    pair.check()
    pair.cache.free(0)
    pair.cache.swap_in(0, swapped)
    pair.model.rows[0] = model_row
    pair.check()


def test_a_swapped_sequence_may_enter_several_rows_and_an_equal_cache():
    pair = busy_pair()
    swapped = pair.cache.swap_out(0)
    other = PagedCache(pair.cache.spec, backend="reference")
    valid = torch.tensor([[True], [True]])
    other.begin(2, 1, valid)
    other.reset()
    other.begin(2, 1, torch.zeros(2, 1, dtype=torch.bool))
    drop_pass(other)
    other.swap_in(0, swapped)
    other.swap_in(1, swapped)
    for layer in range(3):
        for a, b in zip(other.dequantize(layer, 0), other.dequantize(layer, 1), strict=True):
            assert torch.equal(a, b)
    check_books(other)


def test_a_swapped_sequence_can_be_copied_and_damage_in_memory_is_found():
    pair = busy_pair()
    swapped = pair.cache.swap_out(0)
    copied = pickle.loads(pickle.dumps(swapped))
    assert copied.nbytes == swapped.nbytes
    damaged = copy.deepcopy(swapped)
    damaged.blobs[0][1] = damaged.blobs[0][1].copy()
    damaged.blobs[0][1][77] ^= 1
    before = picture(pair.cache)
    with raises(FileFormatError, "damaged"):
        pair.cache.swap_in(0, damaged)
    assert picture(pair.cache) == before
    pair.cache.swap_in(0, copied)
    pair.check()


def test_refused_swaps_change_nothing_and_say_why():
    pair = busy_pair(batch_size=3, max_tokens=170)
    swapped = pair.cache.swap_out(0)
    before = picture(pair.cache)
    with raises(CacheStateError, "sequence 1", "90 tokens", "free(1)"):
        pair.cache.swap_in(1, swapped)
    with raises(DataError, "sequence 7", 3):
        pair.cache.swap_in(7, swapped)
    with raises(DataError, "scheme", "geometry", "spec"):
        _into_other(swapped)
    assert picture(pair.cache) == before


def _into_other(swapped):
    other = PagedCache(small_spec("int8"), backend="reference")
    other.begin(1, 1, torch.zeros(1, 1, dtype=torch.bool))
    drop_pass(other)
    other.swap_in(0, swapped)


def test_a_sequence_quantized_with_other_scales_is_refused():
    spec = small_spec("int8_static")
    statics = [
        [{"k_scale": torch.full((2, 1), s), "v_scale": torch.full((2, 1), s)} for _ in range(3)] for s in (0.1, 0.2)
    ]
    a, b = (busy_pair(spec, s) for s in statics)
    b.cache.free(0)
    with raises(DataError, "calibration"):
        b.cache.swap_in(0, a.cache.swap_out(0))


def test_swapping_into_a_full_pool_fails_whole():
    pair = busy_pair(batch_size=3, max_tokens=160)
    swapped = pair.cache.swap_out(0)
    pair.model.rows[0] = pair.model.new_row()
    valid = torch.zeros(3, 400, dtype=torch.bool)
    valid[1:, 370:] = True
    with pytest.raises(PoolFullError):
        for _ in range(20):
            pair.append(3, 400, valid)
    before = picture(pair.cache)
    with pytest.raises(PoolFullError):
        pair.cache.swap_in(0, swapped)
    assert picture(pair.cache) == before
    pair.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_raw_pages_round_trip(dtype, tmp_path):
    q = QuantSpec(format="int2", granularity=PerGroup(16), symmetric=False)
    spec = CacheSpec(scheme=schemes.get("kivi2", key=q, value=q, residual_length=5), layers=(FULL,), raw_dtype=dtype)
    pair = Pair(PagedCache(spec, backend="reference"), attend=False)
    pair.append(2, 70)
    pair.cache.save(tmp_path / "x")
    pair.cache = PagedCache.load(tmp_path / "x", backend="reference")
    pair.cache.fork(1)
    pair.model.rows.append(pair.model.clone_row(1))
    pair.check()


def test_speculative_tokens_do_not_leave_and_an_interrupted_return_leaves_the_row_empty(monkeypatch):
    cache = PagedCache(CacheSpec(scheme=schemes.get("int8"), layers=(LayerGeometry(num_kv_heads=2, head_dim=64),)))
    k = torch.randn(1, 300, 2, 64).bfloat16()
    cache.append(0, k, k)
    cache.keep_past()
    with raises(CacheStateError, "swap_out()", "speculative", "crop()"):
        cache.swap_out(0)
    cache.crop(300)
    before = cache.dequantize(0, 0)
    swapped = cache.swap_out(0)
    used = {name: p.allocator.num_used for name, p in cache.groups[0].pools.items()}
    place, calls = pool.Pool.place, []

    def interrupted(of, page_id):
        calls.append(page_id)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return place(of, page_id)

    monkeypatch.setattr(pool.Pool, "place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.swap_in(0, swapped)
    monkeypatch.setattr(pool.Pool, "place", place)
    assert cache.seq_lens == [0] and used == {name: p.allocator.num_used for name, p in cache.groups[0].pools.items()}
    cache.swap_in(0, swapped)
    assert all(torch.equal(a, b) for a, b in zip(cache.dequantize(0, 0), before, strict=True))
