"""Paths that can be no path are refused in words, wherever one is given."""

from pathlib import Path

import pytest

from kvbits import files, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.geometry import find_model
from kvbits.spec import CacheSpec, LayerGeometry


@pytest.mark.parametrize("bad", ["a\0b", "a\ud800", "a" * 5000, 5, None], ids=["zero byte", "half a character", "long", "number", "nothing"])
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
    for call in (lambda: files.require_file("/proc/x.json", "--out"), lambda: files.require_folder("/proc/x/y", "--out", writable=True)):
        with pytest.raises(SpecError, match=r"--out /proc/x.*: nothing can be written in /proc \(.*\); name another folder"):
            call()
    assert files.require_folder("/proc/x", "--out") == Path("/proc/x")  # to read, it may be there one day
    assert files.require_file(tmp_path / "new", "--out") == tmp_path / "new" and not list(tmp_path.iterdir())
