"""The thirteen tasks of RULER (arXiv:2404.06654), written anew from the paper's description: prompts of about
--contexts tokens, answered greedily, scored by the share of the wanted strings that the answer has.

    niah_single_1 .. 3     one needle: a word's number in noise, in an essay; a word's long id in an essay
    niah_multikey_1 .. 3   the right one of four needles in an essay; of needles only, words and numbers; of needles
                           only, ids and ids
    niah_multivalue        four numbers of one word, in an essay
    niah_multiquery        numbers of four words, in an essay
    vt                     all variables that have a value by way of four assignments from one another, in noise
    cwe, fwe               the ten words that come most often; the three made-up words that do, by Zipf's law
    qa_1, qa_2             a fact about a person among many; one that takes two facts

The essay is the first --text. A prompt has room for what it asks from about 300 tokens on (cwe hides a hundred words).
The paper's questions are of SQuAD and HotpotQA; here their paragraphs are written by the generator, too, so nothing is
downloaded and no model has read them: figures of qa_1 and qa_2 are not those of others.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import DataError
from ..caches import CacheFactory
from ..rows import generate
from ..texts import bos_of
from . import Record
from .recall import FILLER, PartsTask, words

Body = Iterable[str]
FIRST, LAST, TOWNS = (
    ("Ada", "Bruno", "Clara", "Dario", "Elsa", "Felix", "Greta", "Hugo", "Irma", "Jonas"),
    "bdfghklmnprst",
    "aeiou",
)


@dataclass(frozen=True)
class Asked:
    """A question about a long text.

    Attributes:
        lead: what stands before it.
        body: pieces that fill the room, as many as fit.
        hidden: pieces that are strewn among them, in order.
        question: what stands after it.
        wanted: strings of the right answer.
        new_tokens: of an answer, at most.
    """

    lead: str
    body: Body
    hidden: list[str]
    question: str
    wanted: list[str]
    new_tokens: int = 48


class RulerTask(PartsTask):
    """Each of the thirteen at every length. Every wanted string is a part."""

    name: ClassVar[str] = "ruler"

    @property
    def settings(self) -> dict[str, Any]:
        essay = self.context.texts[0]
        return super().settings | {"text": essay.name, "text_sha256": essay.sha256}

    def room(self, item: tuple[torch.Tensor, Asked]) -> int:
        return len(item[0]) + item[1].new_tokens

    def _made(self, key: str) -> tuple[torch.Tensor, Asked]:
        kind, length, _ = key.split(":")
        rng = self.rng(key)
        asked = TASKS[kind](rng, self._essay(rng), int(length))
        start, end = [*bos_of(self.context.tokenizer), *self.encode(asked.lead)], self.encode(asked.question)
        hidden = [self.encode(piece) for piece in asked.hidden]
        room = int(length) - len(start) - len(end) - sum(map(len, hidden))
        if room < 0:
            raise DataError(
                f"{self.name} {key}: {length} tokens have no room for what is asked; give --contexts of"
                f" {int(length) - room} at least"
            )
        body: list[list[int]] = []
        for piece in asked.body:
            ids = self.encode(piece)
            room -= len(ids)
            if room < 0:
                break
            body.append(ids)
        for at, ids in sorted(
            zip((rng.randrange(len(body) + 1) for _ in hidden), hidden, strict=True), key=lambda one: -one[0]
        ):
            body.insert(at, ids)
        return torch.tensor([*start, *itertools.chain(*body), *end]), asked

    def _essay(self, rng: random.Random) -> Iterator[str]:
        """Yield sentences of the text, from one of them on, again and again."""
        found = [f"{s} " for s in re.split(r"(?<=[.!?])\s+", self.context.texts[0].content) if s]
        return itertools.islice(itertools.cycle(found), rng.randrange(len(found)), None)

    def answers(self, f: CacheFactory, keys: list[str]) -> list[Record]:
        items = [self.item(key) for key in keys]
        most = max(asked.new_tokens for _, asked in items)
        written = generate(
            self.context.model,
            f,
            [prompt for prompt, _ in items],
            most,
            self.chunk,
            lambda t: t[-1] == self.context.tokenizer.eos_token_id,
        )
        found = []
        for tokens, (_, asked) in zip(written, items, strict=True):
            text = str(self.context.tokenizer.decode(tokens[: asked.new_tokens], skip_special_tokens=True))
            found.append(
                {"right": "".join("01"[wanted.lower() in text.lower()] for wanted in asked.wanted), "answer": text}
            )
        return found


def needles(
    what: str, count: int, *, key: str = "word", value: str = "number", values: int = 1, asked: int = 1
) -> Callable[[random.Random, Iterator[str], int], Asked]:
    """Return keys with values. The question asks for the values of the first `asked` keys.

    Args:
        what: they are hidden in: "noise", "essay", or "needles", which are more of their kind.
        count: keys that are hidden besides those of the body.
        key, value: "word", "number" or "id".
        values: of a key.
    """

    def told(rng: random.Random) -> tuple[str, list[str]]:
        return made(key, rng), [made(value, rng) for _ in range(values)]

    def say(name: str, number: str) -> str:
        return f"The secret {value} of {name} is {number}. "

    def ask(rng: random.Random, essay: Iterator[str], length: int) -> Asked:
        facts: dict[str, list[str]] = {}
        while len(facts) < count:
            facts |= [told(rng)]
        names = list(facts)[:asked]
        more = (
            say(name, number)
            for name, numbers in iter(lambda: told(rng), None)
            if name not in facts
            for number in numbers
        )
        body: dict[str, Body] = {"noise": sentences(), "essay": essay, "needles": more}
        hidden = rng.sample(pairs := [say(n, v) for n in facts for v in facts[n]], len(pairs))
        listed = " and ".join(names)
        lead = f"The text below hides secret {value}s. Remember them.\n"
        question = f"\nWhich secret {value}s does the text give for {listed}? The secret {value} of {names[0]} is"
        return Asked(
            lead,
            body[what],
            hidden,
            question,
            [v for n in names for v in facts[n]],
            32 + 24 * len(names) * values * (1 + (value == "id")),
        )

    return ask


def made(kind: str, rng: random.Random) -> str:
    """Return a word pair, a number of seven digits, or an id of 32 hexadecimal ones."""
    if kind == "word":
        return f"{rng.choice(words())}-{rng.choice(words())}"
    if kind == "number":
        return str(rng.randrange(1_000_000, 10_000_000))
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def sentences() -> Iterator[str]:
    """Yield noise without an end."""
    return itertools.cycle(f"{s}. " for s in FILLER.strip().rstrip(".").split(". "))


def variables(rng: random.Random, essay: Iterator[str], length: int) -> Asked:
    """Make a task vt: five names of one value, each given it by the one before."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(5)]
    value = str(rng.randrange(10_000, 100_000))
    steps = [f"VAR {names[0]} = {value}. ", *(f"VAR {b} = VAR {a}. " for a, b in itertools.pairwise(names))]
    lead = "The text below assigns variables. Follow which of them have the same value.\n"
    return Asked(lead, sentences(), steps, f"\nWhich five variables have the value {value}? They are VAR", names)


def common(rng: random.Random, essay: Iterator[str], length: int) -> Asked:
    """Make a task cwe: ten words come ten times as often as the others can."""
    chosen = rng.sample(words(), len(words()))
    times = max(1, length // 1024)
    often, others = chosen[:10], chosen[10:] * times
    hidden = rng.sample(all_of := [f" {w}\n" for w in often for _ in range(10 * times)], len(all_of))
    lead = "Below is a list of words. Some of them come more often than the others.\n"
    return Asked(
        lead,
        (f" {w}\n" for w in rng.sample(others, len(others))),
        hidden,
        "\nThe ten words that come most often in the list are:",
        often,
        64,
    )


def frequent(rng: random.Random, essay: Iterator[str], length: int) -> Asked:
    """Make a task fwe: the k-th of many made-up words comes with a share of k ** -2."""
    coded = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(50)]

    def text() -> Iterator[str]:
        """Yield blocks in any order, each of which makes up what a word's share of all words so far still asks for."""
        total, shown = sum(k**-2.0 for k in range(1, 51)), dict.fromkeys(coded, 0)
        for n in itertools.count(64, 64):
            due = {w: round(n * k**-2.0 / total) - shown[w] for k, w in enumerate(coded, 1)}
            block = [f" {w}" for w, times in due.items() for _ in range(times)]
            for w, times in due.items():
                shown[w] += times
            yield from rng.sample(block, len(block))

    lead = "Below is a coded text. Find the three coded words that come most often.\n"
    return Asked(lead, text(), [], "\nThe three coded words that come most often are:", coded[:3], 32)


def facts(hops: int) -> Callable[[random.Random, Iterator[str], int], Asked]:
    """Make a task qa: where somebody was born, or where somebody's teacher was."""

    def syllables(rng: random.Random, n: int) -> str:
        return "".join(rng.choice(LAST) + rng.choice(TOWNS) for _ in range(n)).capitalize()

    def person(rng: random.Random) -> tuple[str, str, str]:
        name, town = f"{rng.choice(FIRST)} {syllables(rng, 3)}", syllables(rng, 4)
        return (
            name,
            town,
            f"{name} was born in {town} in {rng.randrange(1850, 1980)} and worked as a {rng.choice(words())} maker. ",
        )

    def ask(rng: random.Random, essay: Iterator[str], length: int) -> Asked:
        (asked, own, first), (teacher, town, second) = person(rng), person(rng)
        others = (person(rng)[2] for _ in itertools.count())
        lead = "Below are facts about many people. Answer the question with the help of them.\n"
        if hops == 1:
            return Asked(
                lead, others, [first], f"\nQuestion: Where was {asked} born? Answer: {asked} was born in", [own], 16
            )
        hidden = rng.sample([first, f"{asked} was taught by {teacher}. ", second], 3)
        return Asked(
            lead,
            others,
            hidden,
            f"\nQuestion: In which town was the teacher of {asked} born? Answer: The teacher of {asked} was born in",
            [town],
            16,
        )

    return ask


TASKS: dict[str, Callable[[random.Random, Iterator[str], int], Asked]] = {
    "niah_single_1": needles("noise", 1),
    "niah_single_2": needles("essay", 1),
    "niah_single_3": needles("essay", 1, value="id"),
    "niah_multikey_1": needles("essay", 4),
    "niah_multikey_2": needles("needles", 1),
    "niah_multikey_3": needles("needles", 1, key="id", value="id"),
    "niah_multivalue": needles("essay", 1, values=4),
    "niah_multiquery": needles("essay", 4, asked=4),
    "vt": variables,
    "cwe": common,
    "fwe": frequent,
    "qa_1": facts(1),
    "qa_2": facts(2),
}
"""The paper's name -> what makes one of its prompts: (draws, sentences of an essay, tokens) -> what is asked."""
RulerTask.KINDS = tuple(TASKS)
