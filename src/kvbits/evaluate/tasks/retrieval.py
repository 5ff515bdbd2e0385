"""Facts about many alike names, told in a long prompt and asked for with the right answer fed (`recall`). `ruler` has
the other kinds of finding.

    entities   many people with a number each, some of them alike, told twice in shuffled order; the question is one of
               them
"""

from __future__ import annotations

import random
from typing import ClassVar

from ...errors import DataError
from ..texts import bos_of
from . import Context
from .recall import FILLER, ForcedTask, Part

NAMES = (
    "Anna",
    "Hanna",
    "Johanna",
    "Marta",
    "Martha",
    "Jon",
    "John",
    "Joan",
    "Peter",
    "Petra",
    "Carl",
    "Carla",
    "Louis",
    "Louise",
    "Paul",
    "Paula",
)


class EntitiesTask(ForcedTask):
    """Alike names with a number each, in prompts of exactly --contexts tokens.

    A kind is a depth: the position in the first telling of the person in the question.
    """

    name: ClassVar[str] = "entities"

    def __init__(self, context: Context) -> None:
        self.KINDS = tuple(f"{depth:g}" for depth in context.options.depths)  # type: ignore[misc]
        super().__init__(context)

    def parts(self, kind: str, length: int, rng: random.Random) -> tuple[list[int], list[Part]]:
        people = rng.sample(NAMES, len(NAMES))
        numbers = rng.sample(range(100, 1000), len(people))
        told = [f"{p} keeps the number {n}." for p, n in zip(people, numbers, strict=True)]
        again = rng.sample(told, len(told))
        asked = people[at := min(int(float(kind) * len(people)), len(people) - 1)]
        start = self.encode("A list of people and their numbers.\n" + " ".join([*told, *again]) + "\n")
        end = self.encode(f"\nWhich number does {asked} keep? {asked} keeps the number")
        room = length - len(bos_of(self.context.tokenizer)) - len(start) - len(end)
        if room < 0:
            raise DataError(
                f"a prompt of {length} tokens has no room for what is asked, which takes {length - room}; give"
                " --contexts of more"
            )
        noise = self.encode(FILLER * (room // 12 + 2))[:room]
        return [*start, *noise, *end], [(f" {numbers[at]}", True)]
