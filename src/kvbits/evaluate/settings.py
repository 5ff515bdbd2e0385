"""Settings that an evaluation and a check accept. This module does not need torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError, too_small
from ..settings import names_in, once, setting
from ..units import parse_tokens
from . import MAX_KL, MAX_PPL_CHANGE

DATA = ("humaneval", "gsm8k", "gsm8k_train", "mmlu", "mmlu_dev")
"""Files that benchmarks read."""


def _lengths(option: str, text: str) -> tuple[int, ...]:
    return once(option, [parse_tokens(n, option) for n in names_in(option, text)])


def _floats(option: str, text: str) -> tuple[float, ...]:
    names = names_in(option, text)
    try:
        numbers = [float(n) for n in names]
    except ValueError:
        raise SpecError(f"{option} {text!r} is not a list of numbers like 0,0.5,1") from None
    return once(option, numbers)


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    if bad := [g for g in given if "=" not in g]:
        raise SpecError(f"{option} {bad[0]!r} is not NAME=FILE, like humaneval=HumanEval.jsonl")
    return dict(g.split("=", 1) for g in given)


def _share(option: str, text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal()):
        raise SpecError(f"{option} {text!r} is not two numbers like 2/4, the second of four parts")
    return int(part), int(parts)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of an evaluation. Tasks that are not named take what they usually take.

    Attributes:
        chunk: tokens per forward pass; None for the task's usual number (`Task.usual_chunk`).
        contexts: tokens of a prompt; None for the task's usual numbers (`PartsTask.usual_contexts`).
        limit: problems of a benchmark; a larger limit adds to a smaller one's.
        batch_size: figures depend on it by rounding alone, but for speeds, which are of single windows only. None for
            the task's usual number (`Task.usual_batch`); attention and decode take one.
        share: (part, parts): a run takes every `parts`-th item, from the `part`-th on.

    Raises:
        SpecError: an invalid number, or data of no benchmark.
    """

    windows: int = setting(16, "Windows of each text, spread evenly over it; replay: chains.", least=1)
    length: int = setting(
        1024, "Tokens of a window, or of a chain with its prompt (200 to 400); 1k is 1,024.", tokens=2
    )
    chunk: int | None = setting(
        None,
        "Tokens per forward pass. Tokens of one pass read one another in 16 bits, so long passes flatter few bits.",
        shown="16 (fidelity, follow, replay), else 128",
        tokens=1,
    )
    context: int = setting(512, "decode, greedy, follow: tokens before decoding.", tokens=1)
    new_tokens: int = setting(64, "decode, greedy, follow: tokens to decode; copying: tokens to copy.", tokens=1)
    contexts: tuple[int, ...] | None = setting(
        None,
        "entities, tracking, ruler (300 at least), tools (2,000 at least): tokens of a prompt. copying: tokens back.",
        read=_lengths,
        shown="2000,4000 (tools), else 1024,2048",
    )
    depths: tuple[float, ...] = setting(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        "entities: place of the name that is asked for, 0 (the first) to 1.",
        read=_floats,
        shown="0,0.25,0.5,0.75,1",
    )
    repeats: int = setting(1, "Prompts per length and depth or kind; tools: histories of ten calls.", least=1)
    limit: int | None = setting(None, "Problems of a benchmark, drawn by the seed; all if not given.", least=1)
    shots: int | None = setting(
        None, "Worked examples before a question; the benchmark's usual number if not given.", least=0
    )
    draws: int = setting(
        0, "gsm8k, humaneval: number of sampled answers to a problem; 0 takes one greedy answer.", least=0
    )
    batch_size: int | None = setting(
        None,
        "Prompts or windows at once. Every cache holds all of them.",
        shown="1 (fidelity), 4 (replay), else 8",
        least=1,
    )
    data: dict[str, str] = setting(
        {}, "Benchmark file, like humaneval=HumanEval.jsonl. Repeatable.", read=_pairs, many=True
    )
    seed: int = setting(0, "Seed that draws prompts and samples.")
    share: tuple[int, int] = setting(
        (1, 1),
        "The part of all items that this process takes: 2/4 is the second of four. Processes of one --out write the"
        " same files.",
        read=_share,
        shown="1/1",
    )

    def __post_init__(self) -> None:
        for name in ("windows", "length", "chunk", "context", "new_tokens", "repeats", "batch_size", "limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SpecError(too_small(name, value, 1))
        if self.draws < 0:
            raise SpecError(f"draws={self.draws} is negative; 0 writes one greedy answer")
        if self.contexts == ():
            raise SpecError("contexts=() names no length; give at least one, or None for those of the tasks")
        if bad_contexts := [n for n in self.contexts or () if n < 1]:
            raise SpecError(too_small("contexts", bad_contexts[0], 1))
        if unknown := [name for name in self.data if name not in DATA]:
            raise SpecError(f"data {unknown[0]!r} belongs to no benchmark; known: {', '.join(DATA)}")
        if not 1 <= self.share[0] <= self.share[1]:
            raise SpecError(
                f"share {self.share[0]}/{self.share[1]}: the first number is a part, from 1 to the second, like 2/4"
            )
        if bad := [d for d in self.depths if not 0 <= d <= 1]:
            raise SpecError(f"depth {bad[0]} is outside 0 (start) to 1 (end)")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits within which a check passes. Layer limits are means over kv heads. `evaluate.attention` explains the
    measures.

    The limits were set on models with these figures. 8-bit and per-channel 4-bit keys stay at a cosine above 0.996 and
    a TVD below 0.06. Per-token 4-bit keys of models without a key bias stay at 0.976 and 0.09. Layers with a key bias
    fall to 0.5 and 0.4.
    """

    logit_cosine: float = 0.95
    tvd: float = 0.12
    output_error: float = 0.35
    saturated: float = 0.005
    kl: float = setting(MAX_KL, "Largest KL divergence that passes, nats.", "--max-kl")
    ppl_change: float = setting(
        MAX_PPL_CHANGE, "Largest rise of perplexity that passes; 0.02 is 2 %.", "--max-ppl-change"
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise SpecError(f"limit {name}={value} must be a number of at least 0")
