"""Killed writers, full disks, flipped bits, cut files, other versions, foreign and hostile files: nothing wrong is ever
loaded, the store goes on, the file is named.
"""

import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import raises, warns
from store_checks import FULL, bytes_of, cache_of, ids_of, pieces, spec_of

from kvbits import PrefixStore
from kvbits.cache import blob, reading, transfer
from kvbits.cache.blob import Header, Kind, Page, Table
from kvbits.errors import SpecError
from kvbits.store import folder

SPEC, _ = pieces("int4")
IDS = ids_of(400)


@pytest.fixture
def full(tmp_path):
    """A store with one prompt, its cache, and the files in the order of its tokens, the END last."""
    store, donor = PrefixStore(tmp_path / "store", blob_tokens=64), cache_of(SPEC, IDS)
    store.put(donor, IDS)
    files = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    files.sort(key=lambda p: Header.parse(p.read_bytes(), "").start)
    return store, donor, files


def load(store, ids=IDS):
    cache = cache_of(SPEC)
    return store.load(cache, ids), cache


def test_writers_that_are_killed_leave_a_store_that_is_right(tmp_path):
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "killed_writers.py"), str(tmp_path / "store"), "20"],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seen = json.loads(run.stdout)
    assert seen["kills"] == 30
    assert seen["whole"] + seen["parts"] + seen["nothing"] == 84


def test_a_full_disk_leaves_the_store_as_it_was(full):
    store, _, files = full
    before = {p: p.read_bytes() for p in files}
    more = ids_of(900, 3)
    donor = cache_of(SPEC, more)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_800, hard))  # blobs of pages fit, the first with its sinks does not
    try:
        with raises(OSError, "File too large"):
            store.put(donor, more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p: p.read_bytes() for p in store.folder.root.rglob("*") if p.is_file()} == before
    assert load(store)[0] == 400
    assert store.put(donor, more) == 900


@given(st.data())
def test_a_bit_flipped_anywhere_is_never_loaded_and_its_file_is_named(tmp_path_factory, data):
    store, donor = PrefixStore(tmp_path_factory.mktemp("store"), blob_tokens=64), cache_of(SPEC, IDS)
    store.put(donor, IDS)
    files = sorted(
        (p for p in store.folder.root.rglob("*") if p.is_file()), key=lambda p: Header.parse(p.read_bytes(), "").start
    )
    number = data.draw(st.integers(0, len(files) - 1))
    content = bytearray(files[number].read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 250))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    files[number].write_bytes(content)
    with warns(UserWarning, files[number].name, f"{files[number].name}.damaged"):
        n, loaded = load(store)
    assert n == (0 if number == 0 else 4 + 64 * number)
    assert not files[number].exists()
    assert files[number].with_name(files[number].name + ".damaged").exists()
    for mine, whole in zip(loaded.groups, donor.groups, strict=True):
        for a, b in zip(mine.sequences[0].closed, whole.sequences[0].closed, strict=False):
            assert bytes(mine.pools["closed"].block(a).numpy()) == bytes(whole.pools["closed"].block(b).numpy())
    assert load(store)[0] == n, "the second time nothing is there to be warned of"
    store.put(donor, IDS)
    again = load(store)
    assert again[0] == 400
    assert bytes_of(again[1]) == bytes_of(donor)


@pytest.mark.parametrize("cut", [0, 5, 127, 128, 190, 2000, -1])
@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_file_that_was_cut_short_is_named(full, number, cut):
    store, donor, files = full
    path = files[number]
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    assert store.check(donor) == [reason for reason in store.check(donor) if path.name in reason]
    assert len(store.check(donor)) == 1
    with warns(UserWarning, path.name, "truncated"):
        assert load(store)[0] == {0: 0, 2: 132, -1: 324}[number]
    store.put(donor, IDS)
    assert load(store)[0] == 400


@pytest.mark.parametrize("version", ["BLOB_VERSION", "FORMATS_VERSION"])
def test_another_version_is_named_with_both_versions(full, monkeypatch, version):
    store, _, _ = full
    ours = getattr(blob, version)
    monkeypatch.setattr(blob, version, 9)
    with warns(UserWarning, f"{version.lower()} {ours}", 9):
        assert load(store)[0] == 0


def changed(path, table=None, **fields):
    """A file whose header, and table if one is given, say something else, with right checksums."""
    content = path.read_bytes()
    header = Header.parse(content, "")
    if table is not None:
        text = table.pack()
        fields = {
            "table_crc": zlib.crc32(text),
            "table_bytes": len(text),
            "pages": len(table.pages),
            "checksum": blob.checksum_of_sums(table.sums),
        } | fields
        content = content[:128] + text + content[128 + header.table_bytes :]
    path.write_bytes(dataclasses.replace(header, **fields).pack() + content[128:])


@pytest.mark.parametrize(
    "fields",
    [
        {"data_bytes": 2**62},
        {"data_bytes": 2**63},
        {"data_bytes": 2**61},
        {"data_bytes": 0},
        {"pages": 2**31},
        {"pages": 2**19},
        {"table_bytes": 2**31},
        {"table_bytes": 128},
        {"start": 2**63},
        {"start": 0},
        {"tokens": 2**31},
        {"tokens": 0},
        {"key": bytes(20)},
        {"kind": Kind.END},
        {"kind": Kind.ABOUT},
        {"checksum": 1},
        {"table_crc": 0},
    ],
)
def test_numbers_that_cannot_be_are_refused(full, fields):
    store, _, files = full
    changed(files[2], **fields)
    with warns(UserWarning, files[2].name):
        assert load(store)[0] == 132


def table_of(path):
    content = path.read_bytes()
    header = Header.parse(content, "")
    return Table.parse(header, content[128 : 128 + header.table_bytes], [g for g in SPEC.groups], "")


@pytest.mark.parametrize(
    "wrong",
    [Page(0, "closed", 0), Page(0, "closed", 10**6), Page(0, "sink", 0), Page(0, "tail", 4), Page(0, "sink", 5)],
)
def test_a_blob_brings_no_pages_but_those_of_its_tokens(full, wrong):
    store, _, files = full
    table = table_of(files[2])
    fields = {} if wrong.pool == "closed" else {"data_bytes": Header.parse(files[2].read_bytes(), "").data_bytes}
    changed(files[2], Table([wrong, *table.pages[1:]], table.sums), **fields)
    with warns(UserWarning, files[2].name):
        assert load(store)[0] == 132


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"[" * 100_000,
        b"null",
        b'{"groups": []}',
        b'{"groups": [{"released": 0}]}',
        b'{"groups": [{"length": 1e999}]}',
        {"length": 399},
        {"released": 10},
        {"dropped": 0.0},
        {"dropped": 401},
        {"tail_lengths": [32, 33]},
        {"more": 1},
    ],
)
def test_an_end_that_no_sequence_has_is_refused(full, state):
    store, _, files = full
    table = table_of(files[-1])
    if isinstance(state, dict):
        (group,) = json.loads(table.state)["groups"]
        state = json.dumps({"groups": [group | state]}).encode()
    changed(files[-1], Table(table.pages, table.sums, state))
    with warns(UserWarning, files[-1].name, f"{files[-1].name}.damaged", "sequence"):
        assert load(store)[0] == 324


def test_files_under_another_name_or_of_another_cache_are_not_taken(full, tmp_path):
    store, _, files = full
    content = files[3].read_bytes()
    files[2].write_bytes(content)
    with warns(UserWarning, files[2].name, "tokens"):
        assert load(store)[0] == 132
    other = PrefixStore(tmp_path / "other", blob_tokens=64)
    foreign = cache_of(spec_of("int4", (FULL, FULL, FULL)), IDS)
    other.put(foreign, IDS)
    theirs = sorted(
        (p for p in other.folder.root.rglob("*") if p.is_file()), key=lambda p: Header.parse(p.read_bytes(), "").start
    )
    files[1].write_bytes(theirs[1].read_bytes())
    with warns(UserWarning, files[1].name, "scheme", "geometry"):
        assert load(store)[0] == 68


# -- links and names
# ------------------------------------------------------------------------------------------------------


def outside(tmp_path):
    found = tmp_path / "outside"
    found.mkdir()
    (found / "secret").write_text("untouched")
    return found


@pytest.mark.parametrize("which", ["namespace", "bucket"])
def test_folders_that_are_links_are_refused_and_nothing_is_written_outside(tmp_path, which):
    store, there = PrefixStore(tmp_path / "store", blob_tokens=64), outside(tmp_path)
    donor = cache_of(SPEC, IDS)
    space = store._namespace(donor).name
    if which == "namespace":
        (store.folder.root / space).symlink_to(there)
    else:
        (store.folder.root / space).mkdir()
        for i in range(256):
            (store.folder.root / space / f"{i:02x}").symlink_to(there)
    with raises(SpecError, "symbolic link", "remove"):
        store.put(donor, IDS)
    with raises(SpecError, "symbolic link", "remove"):
        load(store)
    store.explain()
    store.evict(0)
    assert {p.name: p.read_text() for p in there.iterdir()} == {"secret": "untouched"}


def test_files_that_are_links_pipes_or_folders_are_not_read_and_what_they_point_to_is_never_written(full, tmp_path):
    store, donor, files = full
    there = outside(tmp_path)
    content = files[1].read_bytes()
    (there / "blob").write_bytes(content)
    for make in (lambda p: p.symlink_to(there / "blob"), os.mkfifo):
        files[1].unlink()
        make(files[1])
        assert load(store)[0] == 68
        store.put(donor, IDS)
        assert not files[1].is_symlink()
        assert load(store)[0] == 400
    assert (there / "blob").read_bytes() == content
    files[1].unlink()
    files[1].symlink_to(there / "secret")
    store.evict(0)
    assert (there / "secret").read_text() == "untouched"


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a" * 40,
        "a" * 40 + "/../x",
        "a" * 40 + ".0-1\0",
        "/etc/passwd",
        "",
        "A" * 40 + ".0-1",
        "a" * 300,
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    where = folder.Folder(tmp_path / "store")
    for call in (
        where.open,
        where.remove,
        where.set_aside,
        lambda space, name: where.write(space, [(name, [memoryview(b"x")])]),
    ):
        with raises(SpecError, repr(name)):
            call("ab" * 20, name)
    for space in ("..", "../x", "", "/"):
        with raises(SpecError, repr(space)):
            where.open(space, "a" * 40 + ".0-1")
    assert [p.name for p in tmp_path.rglob("*")] == ["store"]


def test_the_lock_of_an_eviction_is_no_way_out(full, tmp_path):
    store, _, _ = full
    (store.folder.root / ".evicting").symlink_to(tmp_path / "made")
    with raises(SpecError, ".evicting", "symbolic link", "remove"):
        store.evict(0)
    assert not (tmp_path / "made").exists()
    (store.folder.root / ".evicting").unlink()
    (store.folder.root / ".evicting").mkdir()
    with raises(SpecError, ".evicting", "symbolic link", "remove"):
        store.evict(0)


def test_a_folder_where_a_file_belongs_is_named(full):
    store, donor, files = full
    files[1].unlink()
    files[1].mkdir()
    assert load(store)[0] == 68
    with raises(SpecError, files[1], "folder", "remove"):
        store.put(donor, IDS)
    assert not list(store.folder.root.rglob(".part-*"))
    files[1].rmdir()
    assert store.put(donor, IDS) == 400
    assert load(store)[0] == 400


def test_a_folder_that_somebody_removed_is_an_empty_store(full):
    import shutil

    store, donor, _ = full
    shutil.rmtree(store.folder.root)
    assert load(store)[0] == 0
    store.folder.root.mkdir()
    store.put(donor, IDS)
    assert load(store)[0] == 400


def test_a_pin_that_names_anything_else_pins_nothing(full):
    store, donor, files = full
    store.pin(donor, IDS)
    pin = next(p for p in store.folder.root.rglob("*.pin"))
    for content in (b"[" * 10**5, b'{"a": 1}', b'["../../x", 5]', b"\xff", b"7"):
        pin.write_bytes(content)
        store.put(donor, IDS)
        store.evict(0)
        assert not any(p.exists() for p in files)


def test_old_temporary_files_are_cleared_and_those_being_written_are_not(full, monkeypatch):
    import fcntl

    store, _, files = full
    mine, theirs = (files[0].with_name(f"{folder.TEMPORARY}{n}") for n in (1, 2))
    for p in (mine, theirs):
        p.write_bytes(b"x")
        os.utime(p, (0, 0))
    with theirs.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.explain()
        assert (mine.exists(), theirs.exists()) == (False, True)
    store.explain()
    assert not theirs.exists()


def test_ids_are_named_by_their_tokens_and_nothing_else():
    from kvbits.store import keys

    a = keys.chain("seed", np.arange(10), [3, 7])
    assert keys.chain("seed", keys.token_ids(list(range(8))), [3, 7]) == a
    assert keys.chain("seed", np.arange(10), [3, 8])[1] == a[1]
    assert keys.chain("other", np.arange(10), [3, 7])[0] != a[0]
    assert len(set(a)) == 3


def test_an_end_of_pages_that_no_blob_has_is_left_out(full):
    store, _, files = full
    table = table_of(files[-1])
    (group,) = json.loads(table.state)["groups"]
    group["closed"][0] += 100
    changed(files[-1], Table(table.pages, table.sums, json.dumps({"groups": [group]}).encode()))
    assert load(store)[0] == 324


def test_pages_that_go_by_way_of_other_memory_are_the_same_and_checked(full, monkeypatch):
    """The CPU's memory takes the way of a GPU's pages."""
    store, donor, files = full
    monkeypatch.setattr(transfer, "Reading", functools.partial(reading.Reading, staged=True))
    n, loaded = load(store)
    assert n == 400 and bytes_of(loaded) == bytes_of(donor)
    data = bytearray(files[0].read_bytes())
    data[-5] ^= 1
    files[0].write_bytes(data)
    with warns(UserWarning, files[0].name, "damaged"):
        assert load(store)[0] == 0


def test_a_file_that_was_moved_to_another_name_is_written_anew_by_the_next_put(tmp_path):
    spec, ids = spec_of(), ids_of(700)
    cache, store = cache_of(spec, ids), PrefixStore(tmp_path)
    store.put(cache, ids)
    first, second = sorted(
        (p for p in tmp_path.rglob("*.0-1") if "+" not in p.name), key=lambda p: p.stat().st_size, reverse=True
    )
    first.rename(second)
    assert store.put(cache, ids) == 700
    loaded = cache_of(spec)
    assert store.load(loaded, ids) == 700 and bytes_of(loaded) == bytes_of(cache)
