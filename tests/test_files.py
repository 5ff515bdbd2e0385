"""Paths that can be no path are refused in words, wherever one is given."""

import os
import socket
from pathlib import Path

import pytest

from kvbits import files, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.geometry import find_model
from kvbits.spec import CacheSpec, LayerGeometry


@pytest.mark.parametrize(
    "bad", ["a\0b", "a\ud800", "a" * 5000, 5, None], ids=["zero byte", "half a character", "long", "number", "nothing"]
)
@pytest.mark.parametrize("door", ["require_file", "require_folder", "save", "load", "find_model"])
def test_what_is_no_path_is_refused(door, bad, tmp_path):
    path = str(tmp_path / bad) if isinstance(bad, str) else bad
    spec = CacheSpec(scheme=schemes.get("raw"), layers=(LayerGeometry(num_kv_heads=1, head_dim=64),))
    doors = {
        "require_file": lambda: files.require_file(path, "--out"),
        "require_folder": lambda: files.require_folder(path, "--out"),
        "save": lambda: PagedCache(spec).save(path),
        "load": lambda: PagedCache.load(path),
        "find_model": lambda: find_model(path, look_up=False),
    }
    with pytest.raises(SpecError, match="is no path|longer than a path can be|no such file"):
        doors[door]()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files, also of root")
def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path):
    for call in (
        lambda: files.require_file("/proc/x.json", "--out"),
        lambda: files.require_folder("/proc/x/y", "--out", writable=True),
    ):
        with pytest.raises(
            SpecError, match=r"--out /proc/x.*: nothing can be written in /proc \(.*\); name another folder"
        ):
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
    with pytest.raises(SpecError, match=r"the directory .*missing does not exist; create it first"):
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
                with pytest.raises(
                    SpecError, match=rf"(save:|--out) {path} is a device, a pipe or a socket, .*; name a regular file"
                ):
                    call()
        assert os.lstat("x") == before and files.require_file("x", "--html") == Path("x")  # which is written into
