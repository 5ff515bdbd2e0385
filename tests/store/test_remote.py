"""A remote store behind a local folder: what one machine put another loads, damage and lost connections included."""

import uuid
import warnings

import pytest
from messages import raises, warns
from store_checks import bytes_of, cache_of, ids_of, pieces

from kvbits import PrefixStore
from kvbits.cache import transfer
from kvbits.errors import SpecError
from kvbits.store import namespace

SPEC, _ = pieces("int4")
IDS = ids_of(400)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return (
        f"memory://{uuid.uuid4().hex}/prefixes" if request.param == "memory" else f"file://{tmp_path}/bucket/prefixes"
    )


def machine(url, tmp_path, name, **options):
    return PrefixStore(url, local=tmp_path / name, blob_tokens=64, **options)


def load(store, ids=IDS):
    cache = cache_of(SPEC)
    return store.load(cache, ids), cache


def test_what_one_machine_put_another_loads_and_then_has(url, tmp_path):
    donor, a, b = cache_of(SPEC, IDS), machine(url, tmp_path, "a"), machine(url, tmp_path, "b")
    assert a.put(donor, IDS) == 400
    n, loaded = load(b)
    assert n == 400
    assert bytes_of(loaded) == bytes_of(donor)
    assert b.nbytes == a.nbytes
    other = ids_of(400, 1)
    other[:200] = IDS[:200]
    assert load(machine(url, tmp_path, "c"), other)[0] == 196
    here = PrefixStore(tmp_path / "b", blob_tokens=64)  # without a connection
    assert load(here)[0] == 400, "what is here is good alone"


def test_a_readers_local_folder_keeps_to_its_size(url, tmp_path):
    a, prompts = machine(url, tmp_path, "a"), [ids_of(400, seed) for seed in range(5)]
    for ids in prompts:
        a.put(cache_of(SPEC, ids), ids)
    most = a.nbytes // 2
    b = machine(url, tmp_path, "b", max_bytes=most)
    for ids in prompts * 2:
        assert load(b, ids)[0] == 400 and b.nbytes <= most
        assert b.match(cache_of(SPEC), ids) == 400 and b.nbytes <= most
    b.pin(cache_of(SPEC), prompts[0])
    assert b.nbytes <= most
    small = machine(url, tmp_path, "c", max_bytes=1)
    assert load(small, prompts[3])[0] == 400 and small.nbytes <= 1


def test_nothing_is_left_under_a_temporary_name_and_what_is_there_is_not_sent_again(url, tmp_path, monkeypatch):
    donor, a = cache_of(SPEC, IDS), machine(url, tmp_path, "a")
    a.put(donor, IDS)
    there = a.folder.fs.find(a.folder.there)
    assert len(there) == 6
    assert not [p for p in there if ".part-" in p]
    sent = []
    monkeypatch.setattr(a.folder.fs, "pipe_file", lambda path, data: sent.append(path))
    a.put(donor, IDS)
    assert not sent


def test_a_put_that_lost_its_connection_is_made_good_by_the_next(url, tmp_path, monkeypatch):
    donor, a = cache_of(SPEC, IDS), machine(url, tmp_path, "a")
    pipe, sent = a.folder.fs.pipe_file, []

    def broken(path, data):
        sent.append(path)
        if len(sent) > 2:
            raise ConnectionResetError("the other side hung up")
        pipe(path, data)

    monkeypatch.setattr(a.folder.fs, "pipe_file", broken)
    with pytest.raises(ConnectionResetError):
        a.put(donor, IDS)
    assert load(a)[0] == 400, "here it is whole"
    monkeypatch.undo()
    assert load(machine(url, tmp_path, "b"))[0] < 400
    a.put(donor, IDS)
    assert load(machine(url, tmp_path, "c"))[0] == 400


def test_a_damaged_object_is_named_set_aside_there_too_and_made_again(url, tmp_path):
    donor, a = cache_of(SPEC, IDS), machine(url, tmp_path, "a")
    a.put(donor, IDS)
    path = next(p for p in a.folder.fs.find(a.folder.there) if "+" in p)
    data = bytearray(a.folder.fs.cat_file(path))
    data[-5] ^= 1
    a.folder.fs.pipe_file(path, bytes(data))
    b = machine(url, tmp_path, "b")
    with warns(UserWarning, path.rsplit("/", 1)[-1]):
        assert load(b)[0] == 324
    assert not a.folder.fs.exists(path)
    a.put(donor, IDS)
    assert load(machine(url, tmp_path, "c"))[0] == 400


@pytest.mark.parametrize("held", [True, False], ids=["files that are held open", "more files than that"])
def test_a_file_that_was_evicted_here_during_a_load_is_fetched_again_and_nothing_is_damaged(
    url, tmp_path, monkeypatch, held
):
    donor, a = cache_of(SPEC, IDS), machine(url, tmp_path, "a")
    a.put(donor, IDS)
    real, evicted = transfer.admit, []

    def admit(*args, **options):
        if not evicted:
            evicted.append(machine(url, tmp_path, "a").evict(0))
        return real(*args, **options)

    monkeypatch.setattr(transfer, "admit", admit)
    if not held:
        monkeypatch.setattr(namespace, "MOST_FILES", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        n, loaded = load(a)
    assert evicted[0] > 0
    assert n == 400
    assert bytes_of(loaded) == bytes_of(donor)
    assert not a.explain()["damaged"]
    assert not [p for p in a.folder.fs.find(a.folder.there) if "damaged" in p]


def test_the_local_folder_keeps_to_its_size_and_the_rest_stays_there(url, tmp_path):
    small = machine(url, tmp_path, "a", max_bytes="100KB")
    for seed in range(4):
        ids = ids_of(400, seed)
        small.put(cache_of(SPEC, ids), ids)
    assert small.nbytes <= 150_000
    assert load(small, ids_of(400, 0))[0] == 400


def test_bad_urls_and_options_are_refused(tmp_path):
    with raises(SpecError, "nosuch://x", "fsspec"):
        PrefixStore("nosuch://x", local=tmp_path)
    with raises(SpecError, "local", tmp_path, "remote"):
        PrefixStore(tmp_path, local=tmp_path)
    with raises(SpecError, "'anon'", tmp_path, "remote"):
        PrefixStore(tmp_path, anon=True)


def test_the_local_folder_of_a_url_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a, b = (PrefixStore(f"memory://{uuid.uuid4().hex}") for _ in "ab")
    assert a.folder.root.parent == b.folder.root.parent == tmp_path / "kvbits" / "prefixes"
    assert a.folder.root != b.folder.root
    assert repr(a).startswith("PrefixStore('memory://")


@pytest.fixture
def bucket():
    """A bucket of an S3 server on this machine, and what s3fs needs to reach it."""
    server, s3fs = (
        pytest.importorskip("moto.server", reason="no S3 server: pip install 'moto[server]' s3fs"),
        pytest.importorskip("s3fs"),
    )
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    s3fs.S3FileSystem(**options).mkdir("prefixes")
    yield "s3://prefixes/of/a/model", options
    running.stop()


def test_an_s3_server_keeps_prefixes_and_damage_there_is_found_and_replaced(bucket, tmp_path):
    url, options = bucket
    donor, a = cache_of(SPEC, IDS), machine(url, tmp_path, "a", **options)
    assert a.put(donor, IDS) == 400
    remote = a.folder
    there = remote.fs.find(remote.there)
    assert len(there) == 6, "uploads appear whole: nothing is renamed"
    b = machine(url, tmp_path, "b", **options)
    n, loaded = load(b)
    assert (n, bytes_of(loaded)) == (400, bytes_of(donor))
    assert b.match(cache_of(SPEC), ids_of(400, 1)) == 0
    path = next(p for p in there if "+" in p)
    data = bytearray(remote.fs.cat_file(path))
    data[-1] ^= 1
    remote.fs.pipe_file(path, bytes(data))
    with warns(UserWarning, "damaged"):
        assert load(machine(url, tmp_path, "c", **options))[0] < 400
    assert load(machine(url, tmp_path, "d", **options))[0] == 324
    a.put(donor, IDS)
    assert load(machine(url, tmp_path, "e", **options))[0] == 400
