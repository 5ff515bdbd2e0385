"""Writers of a store that are killed at any moment, and two at once: nothing wrong is ever loaded, and the store stays
usable.

    python tests/store/killed_writers.py FOLDER [kills]

Forks writers that put prompts, kills each with SIGKILL after a random time, and loads every prompt after each. Prints
what it saw as JSON; an error ends it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from store_checks import bytes_of, cache_of, ids_of, pieces

from kvbits import PrefixStore
from kvbits.store import folder


def forked(work, *args) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(where: str, kills: int) -> dict[str, int]:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    spec, _ = pieces("int4")
    prompts = [ids_of(700, seed) for seed in range(4)]
    donors = [cache_of(spec, ids) for ids in prompts]
    random.seed(kills)
    seen = {"kills": 0, "whole": 0, "parts": 0, "nothing": 0, "left": 0}
    started = time.time()
    for donor, ids in zip(donors, prompts, strict=True):
        PrefixStore(where + "-timed", blob_tokens=64).put(donor, ids)
    usual = time.time() - started

    def put(order: list[int]) -> None:
        store = PrefixStore(where, blob_tokens=64)
        for i in order:
            store.put(donors[i], prompts[i])

    def look() -> None:
        store = PrefixStore(where, blob_tokens=64)
        for donor, ids in zip(donors, prompts, strict=True):
            one = cache_of(spec)
            n = store.load(one, ids)
            assert n in (0, 700) or (n - 4) % 64 == 0, n
            if n == 700:
                assert bytes_of(one) == bytes_of(donor)
            for g, whole in zip(one.groups, donor.groups, strict=True) if n else ():
                mine = [g.pools["closed"].block(i).numpy().tobytes() for i in g.sequences[0].closed]
                assert mine == [
                    whole.pools["closed"].block(i).numpy().tobytes() for i in whole.sequences[0].closed[: len(mine)]
                ]
            seen["whole" if n == 700 else "parts" if n else "nothing"] += 1
        assert not store.explain()["damaged"]

    for kill in range(kills):
        if kill % 3:
            PrefixStore(where).evict(0)
        order = random.sample(range(4), 4)
        writers = [forked(put, order), *([forked(put, order[::-1])] if kill % 2 else [])]
        time.sleep(random.random() * usual)
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        seen["kills"] += len(writers)
        look()
    left = [p for p in Path(where).rglob(folder.TEMPORARY + "*")]
    seen["left"] = len(left)
    usual_age, folder.ABANDONED_S = folder.ABANDONED_S, 0.0
    PrefixStore(where).explain()
    folder.ABANDONED_S = usual_age  # two writers would take each other's files that are not locked yet for abandoned
    assert not [p for p in Path(where).rglob(folder.TEMPORARY + "*")], "what killed writers left is cleared away"
    both = [forked(put, [0, 1, 2, 3]), forked(put, [0, 1, 2, 3])]
    for writer in both:
        assert os.waitpid(writer, 0)[1] == 0
    before = seen["whole"]
    look()
    assert seen["whole"] == before + 4
    assert PrefixStore(where, blob_tokens=64).check(donors[0]) == []
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)))
