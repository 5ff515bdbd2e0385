"""Paths that can be no path are refused in words, wherever one is given."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from messages import raises
from store_checks import cache_of, ids_of

from kvbits import PrefixStore, files, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.geometry import find_model
from kvbits.spec import CacheSpec, LayerGeometry


@pytest.mark.parametrize(
    "bad, shown",
    [("a\0b", r"a\x00b'"), ("a\ud800", r"a\ud800'"), ("a" * 5000, "characters"), (5, "5"), (None, "None")],
    ids=["zero byte", "half a character", "long", "number", "nothing"],
)
@pytest.mark.parametrize("door", ["require_file", "require_folder", "save", "load", "find_model"])
def test_what_is_no_path_is_refused(door, bad, shown, tmp_path):
    path = str(tmp_path / bad) if isinstance(bad, str) else bad
    spec = CacheSpec(scheme=schemes.get("raw"), layers=(LayerGeometry(num_kv_heads=1, head_dim=64),))
    doors = {
        "require_file": lambda: files.require_file(path, "--out"),
        "require_folder": lambda: files.require_folder(path, "--out"),
        "save": lambda: PagedCache(spec).save(path),
        "load": lambda: PagedCache.load(path),
        "find_model": lambda: find_model(path, look_up=False),
    }
    with raises(SpecError, shown):
        doors[door]()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files, also of root")
def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path):
    for call in (
        lambda: files.require_file("/proc/x.json", "--out"),
        lambda: files.require_folder("/proc/x/y", "--out", writable=True),
    ):
        with raises(SpecError, "--out", "/proc"):
            call()
    assert files.require_folder("/proc/x", "--out") == Path("/proc/x")  # to read, it may be there one day
    assert files.require_file(tmp_path / "new", "--out") == tmp_path / "new" and not list(tmp_path.iterdir())


def test_a_file_takes_the_place_of_what_a_symlink_leads_to(tmp_path):
    (tmp_path / "there").mkdir()
    for name, target in (("old", "there/old"), ("new", "there/new"), ("nowhere", "missing/new")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "there" / "old").write_text("old")
    for name in ("old", "new"):
        assert files.require_file(tmp_path / name, "--out") == tmp_path / name
        with files.whole(tmp_path / name) as partial:
            partial.write_text("whole")
        assert (tmp_path / name).is_symlink() and (tmp_path / "there" / name).read_text() == "whole"
    with raises(SpecError, tmp_path / "missing"):
        files.require_file(tmp_path / "nowhere", "--out")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_no_file_takes_the_place_of_what_is_none(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        os.mkfifo("x") if kind == "pipe" else listening.bind("x")
        Path("link").symlink_to("x")
        before = os.lstat("x")
        spec = CacheSpec(scheme=schemes.get("raw"), layers=(LayerGeometry(num_kv_heads=1, head_dim=64),))
        for path in ("x", "link"):
            for call in (
                lambda: PagedCache(spec).save(path),  # noqa: B023
                lambda: files.require_file(path, "--out", replaced=True),  # noqa: B023
            ):
                with raises(SpecError, path, "regular file"):
                    call()
        assert os.lstat("x") == before and files.require_file("x", "--html") == Path("x")  # which is written into


WRITER = """
import sys, time
from kvbits.files import whole
with whole(sys.argv[1]) as partial:
    partial.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_left_is_cleared_by_the_next_and_a_living_ones_is_not(tmp_path):
    path = tmp_path / "cache"
    (tmp_path / "cache.notes.tmp").write_text("somebody else's")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        with files.whole(path) as partial:
            partial.write_text("first")
        assert len(list(tmp_path.glob("cache.*.tmp"))) == 2, "the other still writes"
        writer.kill()
    with files.whole(path) as partial:
        partial.write_text("second")
    assert {p.name for p in tmp_path.iterdir()} == {"cache", "cache.notes.tmp"} and path.read_text() == "second"


def test_a_user_that_is_not_there_is_a_spec_error_at_every_door(tmp_path):
    where = "~no-such-user/x.json"
    for door in (
        lambda: PrefixStore(where),
        lambda: schemes.read(where),
        lambda: schemes.find(where),
        lambda: find_model(where),
        lambda: files.home(where, "--out"),
    ):
        with pytest.raises(SpecError):
            door()


def test_a_scheme_file_with_another_value_is_noticed_and_an_edit_can_be_kept(tmp_path):
    scheme = schemes.get("int4")
    data = json.loads(scheme.to_json())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dict(reversed(data.items())), indent=2))  # written otherwise, of equal values
    assert schemes.read(str(path)) == scheme
    path.write_text(json.dumps(data | {"residual_length": 128}))
    with raises(SpecError, 'removing "sum"'):
        schemes.read(str(path))
    del data["sum"]
    path.write_text(json.dumps(data | {"residual_length": 128}))
    assert schemes.read(str(path)).residual_length == 128


@pytest.mark.parametrize("head_dim", [24, 64])
def test_equal_caches_give_equal_files(tmp_path, monkeypatch, head_dim):
    from kvbits.cache import pool

    allocate = pool.allocate_slab
    scheme = schemes.get("int8_centered", head_dim=head_dim, num_sink_tokens=1, residual_length=32, page_size=32)
    spec = CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=2, head_dim=head_dim),), raw_dtype="float32")
    ids = ids_of(100)
    written = []
    for byte in (0x00, 0x55, 0xFF):
        monkeypatch.setattr(pool, "allocate_slab", lambda n, device, byte=byte: allocate(n, device).fill_(byte))
        cache = cache_of(spec, ids)
        cache.save(tmp_path / "cache")
        store = PrefixStore(tmp_path / f"store{byte}", blob_tokens=32)
        assert store.put(cache, ids) == 100
        blobs = {p.name: p.read_bytes() for p in store.folder.root.rglob("*") if p.is_file()}
        written.append(((tmp_path / "cache").read_bytes(), blobs))
    assert written[0] == written[1] == written[2]
