"""Layers that start while later ones still load: the same numbers, each waits for its own bytes and no others, and
damage found late never gives an answer.
"""

import copy
import functools
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from integrations.test_huggingface import tiny
from messages import raises, warns
from nightly import at_night
from store_checks import FULL, SCHEMES, SLIDING, bytes_of, cache_of, extend, ids_of, spec_of

from kvbits import KVCache, PrefixStore, schemes
from kvbits.cache import reading, transfer
from kvbits.cache.blob import Header
from kvbits.cache.reading import DamagedError
from kvbits.errors import FileFormatError

IDS = ids_of(420)
LAYERS = 8
SPEC = spec_of(layers=(FULL,) * LAYERS)


@pytest.fixture
def full(tmp_path):
    """A store with one prompt, and its files in the order of its tokens, the END last."""
    store = PrefixStore(tmp_path / "store", blob_tokens=64)
    store.put(cache_of(SPEC, IDS), IDS)
    files = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    return store, sorted(files, key=lambda p: Header.parse(p.read_bytes(), "").start)


class Gate:
    """Reads of later layers than the first part wait until they may."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        real = reading.Source.read

        def read(source, number, to, layers, medium):
            assert not layers.start or self.open.wait(60)
            return real(source, number, to, layers, medium)

        monkeypatch.setattr(reading.Source, "read", read)


def query(layer, heads=4, tokens=1):
    return torch.randn(1, tokens, heads, 32, generator=torch.Generator().manual_seed(layer))


def one_pass(cache, tokens=1, layers=None):
    """Return what a pass of some tokens returns, per layer."""
    found = []
    for layer in range(len(cache.spec.layers)) if layers is None else layers:
        k = query(layer + 100, 2, tokens)
        found.append(cache.step(layer, query(layer, 4, tokens), k, k.flip(-1), scaling=0.2))
    return found


def flip(path, layer, layers=LAYERS):
    """Damage a byte of a layer of the last page of a file."""
    data = bytearray(path.read_bytes())
    page = (len(data) - 128 - Header.parse(bytes(data), "").table_bytes) // Header.parse(bytes(data), "").pages
    data[len(data) - page + layer * (page // layers) + 40] ^= 2
    path.write_bytes(data)


@pytest.mark.parametrize(("name", "tokens"), [*((name, 40) for name in SCHEMES), ("int4", 1)])
@pytest.mark.parametrize(
    ("layers", "staged"),
    [((FULL,) * 5, False), ((FULL,) * 5, True), ((FULL, SLIDING) * 2, True), ((FULL,), False)],
    ids=["5", "5 staged", "windows", "1"],
)
def test_what_begins_early_gives_what_a_whole_load_gives(tmp_path, monkeypatch, name, layers, tokens, staged):
    """Staged: by way of other memory, in small batches, as a GPU's pages go."""
    if staged:
        monkeypatch.setattr(transfer, "Reading", functools.partial(reading.Reading, staged=True))
        monkeypatch.setattr(reading, "AHEAD", 1)
    spec, store = spec_of(name, layers, **SCHEMES[name]), PrefixStore(tmp_path, blob_tokens=64)
    store.put(cache_of(spec, IDS), IDS)
    whole, early, fixed = cache_of(spec), cache_of(spec), cache_of(spec, max_tokens=600)
    n = store.load(whole, IDS)
    assert n == store.load(early, IDS, wait=False) == store.load(fixed, IDS, wait=False) == 420
    expected = one_pass(whole, tokens)
    assert all(
        torch.equal(a, b) for cache in (early, fixed) for a, b in zip(one_pass(cache, tokens), expected, strict=True)
    )
    assert bytes_of(early) == bytes_of(whole) == bytes_of(fixed)
    assert not early.arrivals.under_way


def test_the_first_layers_run_while_later_ones_are_still_to_come(full, monkeypatch):
    store, _ = full
    whole, early = cache_of(SPEC), cache_of(SPEC)
    store.load(whole, IDS)
    expected = one_pass(whole)
    gate = Gate(monkeypatch)
    assert store.load(early, IDS, wait=False) == 420
    assert early.seq_lens == [420]
    found = one_pass(early, layers=range(2))
    assert early.arrivals.under_way
    assert not gate.open.is_set()
    third = threading.Thread(target=lambda: found.extend(one_pass(early, layers=range(2, LAYERS))), daemon=True)
    third.start()
    third.join(0.3)
    assert third.is_alive(), "the third layer does not wait for its bytes"
    gate.open.set()
    third.join(60)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert bytes_of(early) == bytes_of(whole)


@pytest.mark.parametrize(
    "what", ["groups", "dequantize", "store_of", "copy", "pickle", "crop", "swap_out", "fork", "put"]
)
def test_anything_but_a_layer_waits_for_all(full, monkeypatch, what):
    store, _ = full
    whole, early = cache_of(SPEC), cache_of(SPEC)
    store.load(whole, IDS)
    gate = Gate(monkeypatch)
    store.load(early, IDS, wait=False)
    threading.Timer(0.2, gate.open.set).start()
    last = LAYERS - 1
    if what == "dequantize":
        assert all(torch.equal(a, b) for a, b in zip(early.dequantize(last, 0), whole.dequantize(last, 0), strict=True))
    elif what == "store_of":
        page_id = whole.groups[0].sequences[0].closed[-1]
        page = early.store_of(last, "closed").page(early.held_groups[0].sequences[0].closed[-1])
        assert torch.equal(page, whole.store_of(last, "closed").page(page_id))
    elif what in ("copy", "pickle"):
        copied = copy.deepcopy(early) if what == "copy" else pickle.loads(pickle.dumps(early))
        assert bytes_of(copied) == bytes_of(whole)
    elif what == "swap_out":
        early.swap_in(0, early.swap_out(0))
    elif what == "crop":
        early.crop(200), whole.crop(200)
    elif what == "fork":
        assert bytes_of(early, early.fork(0)) == bytes_of(whole)
    elif what == "put":
        assert store.put(early, IDS) == 420
    assert gate.open.is_set() or what == "groups"
    assert bytes_of(early) == bytes_of(whole)


@pytest.mark.parametrize("first", [True, False], ids=["a first pass", "a pass after another row's"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_flipped_bit_in_the_last_layer_takes_the_pass_back_and_names_the_file(full, monkeypatch, tokens, first):
    store, files = full
    flip(files[2], LAYERS - 1)
    cache = cache_of(SPEC) if first else extend(cache_of(SPEC, batch_size=1, max_tokens=600), ids_of(70, 5), 70)
    if not first:
        cache.reset()
    gate = Gate(monkeypatch)
    assert store.load(cache, IDS, wait=False) == 420
    assert all(torch.isfinite(x).all() for x in one_pass(cache, tokens, range(2)))
    gate.open.set()
    with (
        warns(UserWarning, files[2].name),
        raises(DamagedError, files[2].name, "reset()", "free(0)"),
    ):
        one_pass(cache, tokens, range(2, LAYERS))
    assert not cache.in_pass
    assert not files[2].exists()
    assert files[2].with_name(files[2].name + ".damaged").exists()
    for refused in (
        lambda: one_pass(cache, tokens),
        lambda: cache.dequantize(0, 0),
        lambda: cache.groups,
        lambda: store.put(cache, IDS),
        lambda: cache.crop(3),
    ):
        with raises(DamagedError, files[2].name):
            refused()
    cache.reset()
    again = cache_of(SPEC)
    n = store.load(cache, IDS, wait=False)
    assert n == store.load(again, IDS) == 4 + 2 * 64
    assert bytes_of(cache) == bytes_of(again)


def test_a_damaged_sequence_may_be_freed_and_its_row_used_again(full):
    store, files = full
    flip(files[0], LAYERS - 1)
    cache = cache_of(SPEC)
    store.load(cache, IDS, wait=False)
    with warns(UserWarning, "damaged"), pytest.raises(DamagedError):
        one_pass(cache)
    cache.free(0)
    assert cache.seq_lens == [0]
    assert cache.bytes_by_kind()["free"] == cache.nbytes
    assert store.load(cache, IDS, wait=False) == 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(one_pass(extend(cache, IDS, 90)), one_pass(cache_of(SPEC, IDS, 90)), strict=True)
    )


def test_a_file_that_is_cut_after_its_header_was_read_is_damage_too(full, monkeypatch):
    store, files = full
    cache, gate = cache_of(SPEC), Gate(monkeypatch)
    store.load(cache, IDS, wait=False)
    one_pass(cache, layers=range(2))
    os.truncate(files[-1], files[-1].stat().st_size - 9)
    gate.open.set()
    with (
        warns(UserWarning, "damaged"),
        raises(DamagedError, files[-1].name, "reset()", "free(0)"),
    ):
        one_pass(cache, layers=range(2, LAYERS))


def test_files_that_are_evicted_meanwhile_are_still_read(full, monkeypatch):
    store, _ = full
    whole, cache = cache_of(SPEC), cache_of(SPEC)
    store.load(whole, IDS)
    gate = Gate(monkeypatch)
    store.load(cache, IDS, wait=False)
    assert store.evict(0) > 0
    gate.open.set()
    assert bytes_of(cache) == bytes_of(whole)


@pytest.mark.parametrize("what", ["reset", "free"])
def test_a_sequence_that_is_given_up_is_written_no_more(full, monkeypatch, what):
    store, _ = full
    cache, gate = cache_of(SPEC, max_tokens=600), Gate(monkeypatch)
    store.load(cache, IDS, wait=False)
    one_pass(cache, layers=range(2))
    cache.abandon()
    threading.Timer(0.2, gate.open.set).start()
    cache.reset() if what == "reset" else cache.free(0)
    assert not [t for t in threading.enumerate() if t.name.startswith("kvbits-")]
    other = ids_of(300, 9)
    assert bytes_of(extend(cache, other, 300)) == bytes_of(cache_of(SPEC, other))


def test_a_file_that_cannot_be_set_aside_is_left_out(full, monkeypatch):
    store, files = full
    flip(files[2], LAYERS - 1)
    monkeypatch.setattr(store.folder, "set_aside", lambda *_: None)  # a store that can only be read
    with warns(UserWarning, files[2].name, "damaged"):
        assert store.load(cache_of(SPEC), IDS) == 4 + 2 * 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(cache_of(SPEC), IDS) == 4 + 2 * 64


KILLED = """
import os, sys, threading
from kvbits import PrefixStore
from kvbits.cache.reading import Source
sys.path[:0] = sys.argv[2].split(":")
from store_checks import FULL, cache_of, ids_of, spec_of
real, told = Source.read, []
def read(source, number, to, layers, medium):
    if layers.start and sys.argv[3] == "killed":
        if not told:
            told.append(os.write(1, b"on the way\\n"))
        threading.Event().wait()
    return real(source, number, to, layers, medium)
Source.read = read
cache = cache_of(spec_of(layers=(FULL,) * 8))
loaded = PrefixStore(sys.argv[1], blob_tokens=64).load(cache, ids_of(420), wait=False)
os.write(1, b"%d\\n" % loaded)  # a line in one call, beside the thread's
if sys.argv[3] == "killed":
    threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["killed", *at_night("ends")])
def test_a_process_that_ends_in_the_middle_leaves_the_store_as_it_was(full, how):
    store, files = full
    before = [p.read_bytes() for p in files]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    argv = [sys.executable, "-c", KILLED, str(store.folder.root), paths, how]
    child = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    if how == "killed":
        assert {child.stdout.readline().strip(), child.stdout.readline().strip()} == {"on the way", "420"}
        child.kill()
    out, err = child.communicate(timeout=120)
    assert how == "killed" or (child.returncode == 0 and "420" in out), err
    assert [p.read_bytes() for p in files] == before
    assert store.load(cache_of(SPEC), IDS) == 420


@pytest.mark.parametrize("rest", [50, 1])
def test_a_model_goes_on_with_a_damaged_prefix_as_without_or_says_so(tmp_path, rest):
    """The rest of the prompt is computed here, so what is damaged is computed too; where only the last token is left,
    whoever generates is told.
    """
    model = tiny("llama")
    scheme = schemes.get("int8_centered", head_dim=16, page_size=32, num_sink_tokens=4, residual_length=32)
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (1, 300))
    store, other = PrefixStore(tmp_path / "a", blob_tokens=64), PrefixStore(tmp_path / "b", blob_tokens=64)
    KVCache.from_prefix(model, ids[:, : 301 - rest], store=store, scheme=scheme)
    path = sorted(
        (p for p in (tmp_path / "a").rglob("*") if p.is_file()), key=lambda p: Header.parse(p.read_bytes(), "").start
    )[1]
    layers = len(KVCache.for_model(model, scheme).pages.spec.layers)
    flip(path, layers - 1, layers)
    if rest == 1:
        cache = KVCache.from_prefix(model, ids, store=store, scheme=scheme)
        with (
            warns(UserWarning, path.name),
            raises(FileFormatError, path.name, "reset()", "free(0)"),
        ):
            model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        flip(path.with_name(path.name + ".damaged"), layers - 1, layers)  # whole again, then damaged again
        path.with_name(path.name + ".damaged").rename(path)
        flip(path, layers - 1, layers)
        with warns(UserWarning, path.name):
            whole = KVCache.from_prefix(model, ids, store=store, scheme=scheme, wait=True, put=False)
        assert whole.pages.seq_lens == [299], "what is damaged is computed"
    with warns(UserWarning, path.name) if rest > 1 else warnings.catch_warnings():
        again = KVCache.from_prefix(model, ids, store=store, scheme=scheme)
    short = PrefixStore(tmp_path / "b", blob_tokens=64)
    KVCache.from_prefix(model, ids[:, : 4 + 64 + 33], store=other, scheme=scheme)
    fresh = KVCache.from_prefix(model, ids, store=short, scheme=scheme)
    assert again.pages.seq_lens == fresh.pages.seq_lens == [299]
    a, b = (model.generate(ids, past_key_values=x, max_new_tokens=5, do_sample=False) for x in (again, fresh))
    assert torch.equal(a, b)
