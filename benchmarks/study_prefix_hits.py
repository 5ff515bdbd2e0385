"""Share of prompts that a cache of so many tokens still holds: hit rate against capacity over a trace of block hashes,
without a GPU.

    python benchmarks/study_prefix_hits.py conversation_trace.jsonl [--gpu H200] [--out FILE]
    python benchmarks/study_prefix_hits.py chats --users 200 --turns 20

A trace has one request a line: {"input_length": tokens, "hash_ids": [..]}, a number for each block of --block tokens
that says what the block and all before it hold, as in the traces that Mooncake published
(github.com/kvcache-ai/Mooncake, FAST25-release/traces). The word `chats` in place of a file makes users of long chats
from a seed, as `bench_serve_vllm.py turns` does.

A block is found where it and all before it are held. The least recently used block goes first, of a prompt its end, as
in vLLM; since a block is used whenever one behind it is, what is held of a prompt is always its beginning, and one pass
over the trace tells the hit rate of every capacity (stack distances). Answers are left out: the trace does not say
which block of a later prompt was an answer; so is what requests under way take of the cache.

Marked are the tokens that a GPU holds beside Llama-3.1-8B's weights through vLLM in each dtype (`kvbits.planner`), less
the raw copies of --running requests, and those that several GPUs hold as one pool, or where each chat always goes to
the same of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from loads import FIRST_ID, Chats
from run_files import append, arguments

from kvbits import planner
from kvbits.gpus import gpu_memory
from kvbits.integrations.engine.served import PAGE_SIZE

Prompt = tuple[int, list[int]]
"""Tokens, and the number of each block."""
DTYPES = ("bf16", "fp8", "kvbits_int8_centered", "kvbits_klt4", "kvbits_klt3", "kvbits_klt2")
LAYERS, WEIGHTS = planner.uniform(32, 8, 128), 16_060_522_496
"""Llama-3.1-8B."""
SMALLEST = 2**18
"""Tokens of the curve's first capacity; each further one is twice the one before."""


def trace(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            request = json.loads(line)
            yield int(request["input_length"]), list(request["hash_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{path}, line {number}: {error!r}; it must be a JSON object with input_length and hash_ids"
            ) from error


def chats(users: int, turns: int, block: int) -> Iterator[Prompt]:
    """Yield the prompts of `users` whose answers take no time, in the order in which they come."""
    load = Chats(users=users, vocabulary=128256)
    for _ in range(users * turns):
        for at, request in load.due(load.next() or 0.0):
            chain, found = hashlib.blake2b(digest_size=8), []
            for i in range(0, len(request.prompt), block):
                chain.update(np.array(request.prompt[i : i + block]).tobytes())
                found.append(int.from_bytes(chain.digest(), "big"))
            yield len(request.prompt), found
            load.answered(request.name, [FIRST_ID] * request.answer, at)


class Recent:
    """Blocks by their last use, and how many were used after one: a tree of counts (Fenwick) over the times of use."""

    def __init__(self, uses: int) -> None:
        self._tree, self._last, self._now = [0] * (uses + 1), dict[int, int](), 0

    def _add(self, at: int, change: int) -> None:
        while at < len(self._tree):
            self._tree[at] += change
            at += at & -at

    def _before(self, at: int) -> int:
        """Count the blocks last used up to this time."""
        found = 0
        while at:
            found += self._tree[at]
            at &= at - 1
        return found

    def place(self, block: int) -> int | None:
        """Return the fewest blocks that a cache must hold to hold this one: 1 for the one used last, and so on; None
        for one never used.
        """
        at = self._last.get(block)
        return None if at is None else len(self._last) - self._before(at) + 1

    def use(self, block: int) -> None:
        if (at := self._last.get(block)) is not None:
            self._add(at, -1)
        self._now += 1
        self._last[block] = self._now
        self._add(self._now, 1)


def needed(prompts: Iterable[Prompt], block: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (the fewest blocks that a cache must hold for each block of each prompt to be found, most of any int64
    where none would do; tokens of each; requests).
    """
    listed = list(prompts)
    recent = Recent(sum(len(blocks) for _, blocks in listed))
    places: list[int] = []
    tokens: list[int] = []
    for length, blocks in listed:
        found = [recent.place(b) for b in blocks]
        # a block counts where those before it do
        places += itertools.accumulate((np.iinfo(np.int64).max if p is None else p for p in found), max)
        tokens += [min(block, length - i * block) for i in range(len(blocks))]
        for b in reversed(blocks):
            recent.use(b)
    return np.array(places, dtype=np.int64), np.array(tokens, dtype=np.int64), len(listed)


def hit_rate(places: np.ndarray, tokens: np.ndarray, blocks: float) -> float:
    return float(tokens[places <= blocks].sum() / tokens.sum())


def capacities(gpu: str, running: int) -> dict[str, int]:
    """Return the tokens that vLLM's cache holds on one GPU, by dtype."""
    cards = planner.Cards(memory_bytes=gpu_memory(gpu).nbytes, weights_bytes=WEIGHTS)
    found = {}
    for r in planner.plan(
        LAYERS, planner.served(DTYPES), engine="vllm", context=PAGE_SIZE, batch=running, cards=cards
    ).rows:
        copies = r.total_bytes - running * PAGE_SIZE * r.bytes_per_token
        found[r.scheme] = int((cards.cache_bytes - copies) / r.bytes_per_token)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("trace", help="a file of JSON lines, or the word chats")
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the trace")
    parser.add_argument("--gpu", default="H200", help="as `kvbits plan --gpu-memory` takes it")
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 4], help="how many")
    parser.add_argument(
        "--running", type=int, default=128, help="requests at once (max_num_seqs), which raw copies are kept of"
    )
    parser.add_argument("--users", type=int, default=200, help="chats")
    parser.add_argument("--turns", type=int, default=20, help="chats: of each user, about")
    args = parser.parse_args()
    made = chats(args.users, args.turns, args.block) if args.trace == "chats" else trace(Path(args.trace))
    places, tokens, requests = needed(made, args.block)
    unlimited = places[places < np.iinfo(np.int64).max]
    if not len(unlimited):
        raise SystemExit("no prompt begins as an earlier one does: nothing can be found again")
    best = hit_rate(places, tokens, unlimited.max())
    rows = []
    for gpus, (dtype, one) in itertools.product(args.gpus, capacities(args.gpu, args.running).items()):
        capacity = gpus * one
        hits = hit_rate(places, tokens, capacity / args.block)
        again = (1 - hits) / (1 - best)
        rows.append(
            {
                "gpus": gpus,
                "kv_cache_dtype": dtype,
                "capacity_tokens": capacity,
                "hit_rate": round(hits, 4),
                "computed": round(again, 3),
            }
        )
        print(
            f"{gpus} x {args.gpu}, {dtype:22} {capacity:>11,} tokens: {hits:5.1%} of prompts found, {again:.2f} times"
            " what must be computed",
            flush=True,
        )
    doublings = range(max(0, math.ceil(math.log2(unlimited.max() * args.block / SMALLEST))) + 1)
    curve = [
        {"capacity_tokens": SMALLEST << n, "hit_rate": round(hit_rate(places, tokens, (SMALLEST << n) / args.block), 4)}
        for n in doublings
    ]
    append(
        rows,
        args.out,
        sections={"curve": curve},
        benchmark="study_prefix_hits",
        trace=Path(args.trace).name,
        block=args.block,
        requests=requests,
        prompt_tokens=int(tokens.sum()),
        hit_rate_unlimited=round(best, 4),
        tokens_unlimited=int(unlimited.max()) * args.block,
        running=args.running,
        on=args.gpu,
        model="llama-3.1-8b",
    )


if __name__ == "__main__":
    main()
