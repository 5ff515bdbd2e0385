"""A sequence sent over a socket goes on as it would have where it came from: broken connections, slow receivers and hostile senders included."""

import json
import socket
import threading
import time

import pytest
from store_checks import FULL, SLIDING, bytes_of, cache_of, extend, ids_of, pieces, spec_of

from kvbits.cache import blob
from kvbits.cache.blob import Header, Identity, Kind
from kvbits.errors import CacheStateError, DataError, FileFormatError, PoolFullError
from kvbits.store import stream
from kvbits.store.stream import Receiver, Sender

IDS = ids_of(413)


def both(sender, receiver, wrap=lambda connection: connection):
    """Run a transfer: what the sender raised, what the receiver returned or raised."""
    ours, theirs = socket.socketpair()
    found = {}

    def send():
        try:
            sender.send(wrap(ours))
        except Exception as error:
            found["sender"] = error
        finally:
            ours.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        found["ids"] = receiver.receive(theirs)
    except Exception as error:
        found["receiver"] = error
    theirs.close()
    thread.join(60)
    return found


@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("name", ["int4", "raw", "tiered", "token_local"])
def test_what_arrives_is_what_was_sent_and_goes_on_alike(name, windows):
    spec, static = pieces(name, (FULL, SLIDING) if windows else (FULL, FULL))
    donor = cache_of(spec, IDS, 400, static=static)
    cache = cache_of(spec, static=static)
    found = both(Sender(donor, IDS[:400], blob_tokens=64), Receiver(cache))
    assert found == {"ids": IDS[:400].tolist()}
    assert bytes_of(cache) == bytes_of(donor)
    from cache_checks import check_books

    check_books(cache)
    for one in (donor, cache):
        extend(one, IDS, 413, chunk=5)
    assert bytes_of(cache) == bytes_of(donor)


class Breaks:
    """A connection that breaks after so many bytes."""

    def __init__(self, connection, left):
        self.connection, self.left = connection, left

    def sendall(self, data):
        data = memoryview(data)[: self.left]
        self.left -= len(data)
        self.connection.sendall(data)
        if not self.left:
            self.connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("cut")

    def recv_into(self, view):
        return self.connection.recv_into(view)


def test_after_a_broken_connection_it_goes_on_where_it_was():
    spec, _ = pieces("int4", (FULL, SLIDING))
    donor, cache = cache_of(spec, IDS, 400), cache_of(spec)
    sender, receiver = Sender(donor, IDS[:400], blob_tokens=64), Receiver(cache)
    whole = sum(len(p) for i in range(6) for p in sender._blob(i))
    sent, broken = 0, 0
    for left in (100, 3_000, 30_000, 40_000, 70_000, whole * 2, whole * 2):
        before = receiver.received
        found = both(sender, receiver, lambda connection, left=left: Breaks(connection, left))
        sent += left
        if "ids" in found:
            break
        broken += 1
        assert isinstance(found["receiver"], ConnectionError)
        assert receiver.received >= before
    assert broken >= 4
    assert found["ids"] == IDS[:400].tolist()
    assert bytes_of(cache) == bytes_of(donor)


def test_another_transfer_after_a_broken_one_begins_anew_and_frees_what_came():
    spec, _ = pieces("int4")
    other = ids_of(300, 5)
    donor, cache = cache_of(spec, other), cache_of(spec)
    receiver = Receiver(cache)
    first = Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64)
    assert "receiver" in both(first, receiver, lambda connection: Breaks(connection, 40_000))
    assert receiver.received > 0
    assert both(Sender(donor, other, blob_tokens=64), receiver) == {"ids": other.tolist()}
    assert bytes_of(cache) == bytes_of(donor)
    receiver = Receiver(empty := cache_of(spec))
    both(first, receiver, lambda connection: Breaks(connection, 40_000))
    receiver.abandon()
    assert all(p.allocator.num_used == 0 for g in empty.groups for p in g.pools.values())


def test_a_slow_receiver_holds_the_sender_back(monkeypatch):
    spec, _ = pieces("int4")
    monkeypatch.setattr(stream, "WINDOW", 1)
    donor, cache = cache_of(spec, IDS, 400), cache_of(spec)
    sender, receiver = Sender(donor, IDS[:400], blob_tokens=64), Receiver(cache)
    made, ahead = [], []
    encode, tell = sender._blob, stream._tell
    monkeypatch.setattr(sender, "_blob", lambda number: made.append(number) or encode(number))

    def slow(connection, received):
        time.sleep(0.02)
        ahead.append(len(made) - received)
        tell(connection, received)

    monkeypatch.setattr(stream, "_tell", slow)
    assert both(sender, receiver)["ids"] == IDS[:400].tolist()
    assert max(ahead) <= 1, "one blob on its way, the next not made before it was checked"
    assert made == list(range(6))


@pytest.mark.parametrize("change", ["model", "scheme", "version"])
def test_what_does_not_fit_is_refused_before_a_page_is_sent_and_both_know_why(change, monkeypatch):
    spec, _ = pieces("int4")
    donor = cache_of(spec, IDS, 400)
    cache = cache_of(spec_of("int4", residual_length=32) if change == "scheme" else spec)
    if change == "model":
        cache.made_for = "another"
    sender = Sender(donor, IDS[:400])
    monkeypatch.setattr(sender, "_blob", lambda number: pytest.fail("a page was sent"))
    if change == "version":
        pack = Header.pack
        monkeypatch.setattr(Header, "pack", lambda self: pack(self)[:8] + b"\x07\0" + pack(self)[10:])
    found = both(sender, Receiver(cache))
    reason = {"model": "another model", "scheme": "another scheme or geometry", "version": "blob_version 7, but this kvbits reads 1"}[change]
    assert isinstance(found["receiver"], FileFormatError)
    assert reason in str(found["receiver"])
    assert isinstance(found["sender"], FileFormatError)
    assert f"the receiver refuses: {found['receiver']}" == str(found["sender"])


def test_a_cache_without_room_says_so_to_both_and_keeps_nothing():
    spec, _ = pieces("int4")
    cache = cache_of(spec, batch_size=1, max_tokens=150)
    found = both(Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64), Receiver(cache))
    assert isinstance(found["receiver"], PoolFullError)
    assert isinstance(found.get("sender"), (FileFormatError, ConnectionError))
    assert all(p.allocator.num_used == 0 for g in cache.groups for p in g.pools.values())
    assert cache.seq_lens == [0]


def test_sequences_that_tokens_do_not_make_and_rows_that_hold_some_are_refused():
    spec, _ = pieces("int4")
    donor = cache_of(spec, IDS, 400)
    with pytest.raises(DataError, match="413 token ids for a sequence of 400 tokens"):
        Sender(donor, IDS)
    with pytest.raises(CacheStateError, match="sequence 0 holds 400 tokens; receive into an empty one"):
        Receiver(donor)
    donor.crop(300)
    with pytest.raises(DataError, match=r"was cropped into a page or lost pages.*save\(\) its cache"):
        Sender(donor, IDS[:300])


def used(cache):
    return sum(p.allocator.num_used for g in cache.groups for p in g.pools.values())


def test_a_receiver_used_again_leaves_a_live_sequence_alone():
    spec, _ = pieces("int4", (FULL, SLIDING))
    other = ids_of(300, 5)
    first, second = Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64), Sender(cache_of(spec, other), other, blob_tokens=64)
    receiver = Receiver(cache := cache_of(spec))
    assert both(first, receiver) == {"ids": IDS[:400].tolist()}
    before, pages = bytes_of(cache), used(cache)
    for sender in (second, first):
        found = both(sender, receiver)
        assert isinstance(found["receiver"], CacheStateError)
        assert "the receiver refuses: sequence 0 holds 400 tokens" in str(found["sender"])
        assert (bytes_of(cache), used(cache)) == (before, pages)
    cache.free(0)
    assert used(cache) == 0
    for sender, ids in ((first, IDS[:400]), (second, other)):  # the same transfer comes again in full, not as what is there already
        assert both(sender, receiver) == {"ids": ids.tolist()}
        assert cache.seq_lens == [len(ids)]
        cache.free(0)
        assert used(cache) == 0


def test_a_row_that_is_filled_during_a_transfer_is_left_alone(monkeypatch):
    spec, _ = pieces("int4")
    receiver = Receiver(cache := cache_of(spec))
    tell = stream._tell

    def fill(connection, received):
        if received == 2:
            extend(cache, IDS, 100)
        tell(connection, received)

    monkeypatch.setattr(stream, "_tell", fill)
    found = both(Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64), receiver)
    assert isinstance(found["receiver"], CacheStateError)
    assert bytes_of(cache) == bytes_of(alone := cache_of(spec, IDS, 100))
    assert used(cache) == used(alone)


def test_when_only_the_last_answer_is_lost_the_same_transfer_ends_well_unless_the_row_was_freed(monkeypatch):
    spec, _ = pieces("int4")
    tell, whole = stream._tell, IDS[:400].tolist()

    def lost(connection, received):
        if received == 6:
            raise ConnectionResetError("cut")
        tell(connection, received)

    for freed in (False, True):
        sender, receiver = Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64), Receiver(cache := cache_of(spec))
        monkeypatch.setattr(stream, "_tell", lost)
        assert isinstance(both(sender, receiver)["receiver"], ConnectionResetError)
        monkeypatch.setattr(stream, "_tell", tell)
        if freed:
            cache.free(0)
        assert both(sender, receiver) == {"ids": whole}
        assert bytes_of(cache) == bytes_of(cache_of(spec, IDS, 400))


class Says:
    """A connection whose other side answers with these counts, whatever it gets."""

    def __init__(self, *counts):
        self.data = b"".join(stream._COUNT.pack(0, n) for n in counts)

    def sendall(self, data):
        pass

    def recv_into(self, view):
        part, self.data = self.data[: len(view)], self.data[len(view) :]
        view[: len(part)] = part
        return len(part)


@pytest.mark.parametrize(
    ("counts", "reason"), [((10**9,), "1000000000 blobs"), ((1,), "1 blob"), ((0, 0), "0 blobs"), ((0, 1, 2, 1), "1 blob"), ((0, 7), "7 blobs")]
)
def test_a_sender_believes_no_count_that_cannot_be(counts, reason):
    spec, _ = pieces("int4")
    sender = Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64)
    with pytest.raises(FileFormatError, match=f"the receiver says that it has {reason}, which cannot be"):
        sender.send(Says(*counts))
    Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64).send(Says(*range(7)))


def hostile(*messages):
    """A sender that sends these bytes and no more."""

    class One:
        def send(self, connection):
            for message in messages:
                connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):
                pass

    return One()


def hello(spec, **changes):
    about = {"transfer": "x", "ids": IDS[:400].tolist(), "blobs": 6, "blob_tokens": 64} | changes
    return b"".join(blob.encode_bytes(Kind.ABOUT, Identity.of(spec, "a model", bytes(12)), json.dumps(about).encode()))


@pytest.mark.parametrize(
    "changes",
    [
        {"blobs": 10**9}, {"blobs": 0}, {"blobs": -1}, {"blobs": 2.0}, {"blobs": None}, {"ids": []}, {"ids": ["a"]}, {"ids": [1.5]}, {"ids": 7}, {"transfer": 5},
        {"blob_tokens": 0}, {"blob_tokens": "x"}, {"ids": [[1]]},
    ],
)  # fmt: skip
def test_transfers_that_cannot_be_are_refused(changes):
    spec, _ = pieces("int4")
    found = both(hostile(hello(spec, **changes)), Receiver(cache_of(spec)))
    assert isinstance(found["receiver"], FileFormatError)
    assert "begins with what cannot be" in str(found["receiver"])


def test_blobs_that_are_not_the_next_one_or_were_damaged_are_refused():
    spec, _ = pieces("int4")
    sender = Sender(cache_of(spec, IDS, 400), IDS[:400], blob_tokens=64)
    first, second = (b"".join(sender._blob(i)) for i in (0, 1))
    flipped = bytearray(first)
    flipped[-100] ^= 2
    huge = Header.parse(first, "")
    import dataclasses

    long = dataclasses.replace(huge, table_bytes=2**32 - 64).pack()
    for message, reason in (
        (second, "is not the next one"),
        (bytes(flipped), "was damaged on its way"),
        (long, "is not the next one"),
        (b"x" * 128, "is not a kvbits"),
    ):
        cache = cache_of(spec)
        found = both(hostile(hello(spec), message), Receiver(cache))
        assert isinstance(found["receiver"], FileFormatError), found
        assert reason in str(found["receiver"])
        assert all(p.allocator.num_used == 0 for g in cache.groups for p in g.pools.values())


def test_the_example_of_two_processes_runs(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    import tiny

    model = tiny.model()
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "prefill_decode.py"
    run = subprocess.run(
        [sys.executable, str(example), str(tmp_path)], capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "tokens arrived in" in run.stdout
