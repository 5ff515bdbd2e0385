"""Summaries of a task as a table: what figures are called, and how they are written. Commands and reports share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..units import human_bytes
from .paired import AGREEMENT_BOUNDS, BOUNDS, points, share

NAMES = {
    "ppl_change": "change",
    "kl_mean": "KL",
    "kl_median": "median",
    "kl_p99": "99 %",
    "kl_p999": "99.9 %",
    "kl_max": "worst",
    "kl_lost": "> 1 nat",
    "bytes_held": "bytes",
    "tokens_per_s": "tokens/s",
    "top1_agreement": "top-1",
    "dp_rms": "RMS dp",
    "drift": "per doubling",
    "key_bits": "key bits left",
    "value_bits": "value bits left",
}
"""Figures that are not called by their names."""
_SHARES = ("top1_agreement", "mass_matched", "accuracy", "accuracy_base", "token_accuracy", "parsed")
FORMATS = {
    **dict.fromkeys(("ppl_change", "drift"), "+.2%"),
    **dict.fromkeys((*_SHARES, "dp_rms"), ".2%"),
    **dict.fromkeys(("kl_lost", "read_raw"), ".1%"),
    **dict.fromkeys(("kl_mean", "kl_median", "kl_p99", "kl_p999", "kl_max"), ".3g"),
}
"""Formats of figures that are not plain numbers."""
_THEIRS = ("kl_median", "kl_p999", "top1_agreement", "dp_rms")
NARROW: dict[str, tuple[tuple[str, ...], ...]] = {
    "fidelity": (("ppl", "ppl_change", "kl_mean", "kl_max", "kl_lost", "read_raw", "bytes_held"), _THEIRS),
    "decode": (("ppl_change", "kl_mean", "kl_max", "kl_lost", "read_raw", "bytes_held", "tokens_per_s"), _THEIRS),
    "replay": (("kl_mean", "kl_max", "kl_lost", "read_raw", "drift", "first_flip"), _THEIRS),
    "tools": (("agreement", "parsed", "accuracy", "difference"),),
}
"""Columns shown on an 80-column terminal for tasks that read texts: ours, then those of llama.cpp's perplexity tool.
Files and --json contain all of them.
"""
_OF_KL = (
    "worst: the largest KL of a token, nats; > 1 nat: share of tokens whose KL is above; read raw: share of the tokens"
    " attended to that were still 16-bit, mean over scored tokens and layers. As llama-perplexity --kl-divergence has"
    " them: median and 99.9 %: of KL over tokens; top-1: share of equal top tokens; RMS dp: root mean square of the"
    " change of the next token's probability."
)
_OF_PAIRS = (
    "difference: points more than the model's own cache has right (95 % interval); lost, gained: questions that only"
    " one of the two has right; p: McNemar's exact test, with a sign for each prompt. Answers about one prompt depend"
    " on each other, so the interval counts fewer of them; raise --repeats for a narrow one."
)
LEGENDS = {
    "fidelity": _OF_KL,
    "decode": _OF_KL,
    "replay": f"{_OF_KL} per doubling: growth of KL when the position doubles, from 512 on; first flip: mean position.",
    **dict.fromkeys(("entities", "copying", "tracking", "ruler"), _OF_PAIRS),
    "tools": (
        "agreement: share of the calls that the 16-bit cache writes (95 % interval), of those of its calls that parse;"
        f" accuracy: share of calls that are as users told. {_OF_PAIRS}"
    ),
    "attention": (
        "bits left: how many bits of the numbers survive, 1/2 log2(variance / squared error), mean over layers and kv"
        " heads; not what is stored. worst layer: of the largest output error."
    ),
}


def table(
    task: str, rows: Mapping[str, Mapping[str, Any]], *, only: Sequence[str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Make (column names, rows) of summaries by cache.

    Args:
        only: figures that are shown, where they are known; None for all.
    """
    names = dict.fromkeys(
        k
        for r in rows.values()
        for k, v in r.items()
        if k not in (*BOUNDS, *AGREEMENT_BOUNDS) and not isinstance(v, dict | list)
    )
    wanted = [n for n in (names if only is None else only) if n in names]
    cells = [[cache, *(_cell(row, name) for name in wanted)] for cache, row in rows.items()]
    return ["cache", *(NAMES.get(n, n.replace("_", " ")) for n in wanted)], cells


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if name == "difference":
        return points(dict(row))
    if value is None:
        return ""
    if name == "agreement":
        return share(dict(row))
    if name == "bytes_held":
        return human_bytes(value)
    if name in FORMATS:
        return f"{value:{FORMATS[name]}}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
