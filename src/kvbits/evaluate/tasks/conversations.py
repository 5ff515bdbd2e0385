"""Conversations with an assistant that calls functions, written by a seeded generator.

A conversation belongs to an office that has cases. The system turn offers functions: for each thing that a case can be
about, one that does what will be asked for, and one with other parameters that does not. A first case is told and
called, which shows how a call looks. Then users tell other cases, change some of them, and send minutes to keep, which
make the conversation as long as it shall be. In the end a user asks for one call, whose arguments have to be read from
what was told.

Every text here is made up. Arguments are strings, numbers, booleans, one of several words, objects and lists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import DataError
from ..texts import write_chat
from .replay import GOODS, PLACES
from .ruler import FIRST, LAST, TOWNS

Message = dict[str, Any]
Call = dict[str, Any]
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
CASES = (
    "amber",
    "birch",
    "cedar",
    "coral",
    "ember",
    "fjord",
    "grove",
    "ivory",
    "jade",
    "larch",
    "maple",
    "onyx",
    "pearl",
    "quartz",
    "raven",
    "slate",
)
SYSTEM = (
    "You are the assistant of an office. Users tell you about cases. When a user asks for something to be done, call"
    " one function. Take all arguments from what users said before; what was said last counts."
)
TOLD_TO_CALL = """

# Tools

You may call one of these functions:
<tools>
{functions}
</tools>

To call one, write a JSON object with its name and its arguments between these tags, and nothing else:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""
"""Stands behind the system turn where a chat template does not write functions."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Attributes:
        schema: JSON schema.
        draw: makes a value.
        say: puts a value into a user's words.
    """

    schema: dict[str, Any]
    draw: Callable[[random.Random], Any]
    say: Callable[[Any], str]


@dataclass(frozen=True)
class Function:
    """A function that the assistant may call for a case."""

    verb: str
    thing: str
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.thing}"

    @property
    def schema(self) -> dict[str, Any]:
        """The function as chat templates take it."""
        properties = {"case": {"type": "string"}} | {name: PARAMETERS[name].schema for name in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": f"{self.verb.capitalize()} the {self.thing} of a case.",
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }


@dataclass(frozen=True)
class Conversation:
    """A history, and users' last turns. Each turn asks for one call.

    Attributes:
        functions: that the system turn offers.
        start: messages before anything is told that will be asked for.
        told: users' turns that tell, and change, what will be asked for, each with its place, from 0 (begin) to 1.
        minutes: makes one more user's turn that tells nothing of use; the same number gives the same turn.
        asked: users' last turns.
        wanted: the right call for each of `asked`.
    """

    functions: tuple[Function, ...]
    start: list[Message]
    told: list[tuple[float, str]]
    minutes: Callable[[int], str]
    asked: list[str]
    wanted: list[Call]

    def messages(self, turns: int, asked: str) -> list[Message]:
        """Return all messages up to a user's last turn, with so many `turns` of minutes."""
        minutes = [(i / turns, self.minutes(i)) for i in range(turns)]
        found = list(self.start)
        for _, text in sorted(self.told + minutes, key=lambda one: one[0]):
            found += [{"role": "user", "content": text}, {"role": "assistant", "content": "Noted."}]
        return [*found, {"role": "user", "content": asked}]


def person(rng: random.Random) -> str:
    """Return a made-up name."""
    last = "".join(rng.choice(LAST) + rng.choice(TOWNS) for _ in range(3))
    return f"{rng.choice(FIRST)} {last.capitalize()}"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _one_of(*words: str) -> tuple[dict[str, Any], Callable[[random.Random], str]]:
    return {"type": "string", "enum": list(words)}, lambda rng: rng.choice(words)


_OBJECT = {
    "address": {"street": {"type": "string"}, "number": {"type": "integer"}},
    "slot": {"day": {"type": "string"}, "hour": {"type": "integer"}},
}
_TEXTS = {"type": "array", "items": {"type": "string"}}
KINDS: dict[str, dict[str, Parameter]] = {
    "string": {
        "contact": Parameter({"type": "string"}, person, lambda v: f"the contact is {v}"),
        "reference": Parameter(
            {"type": "string"},
            lambda rng: f"{''.join(rng.choices('ABCDEFGHKLMNPRSTUVWXYZ', k=2))}-{rng.randrange(1000, 10000)}",
            lambda v: f"the reference is {v}",
        ),
    },
    "number": {
        "boxes": Parameter({"type": "integer"}, lambda rng: rng.randrange(2, 90), lambda v: f"it has {v} boxes"),
        "weight": Parameter(
            {"type": "number", "description": "Kilograms."},
            lambda rng: rng.randrange(10, 900) / 10,
            lambda v: f"it weighs {v} kilograms",
        ),
    },
    "boolean": {
        "insured": Parameter(
            {"type": "boolean"}, lambda rng: rng.random() < 0.5, lambda v: f"it is {'' if v else 'not '}insured"
        ),
        "fragile": Parameter(
            {"type": "boolean"}, lambda rng: rng.random() < 0.5, lambda v: f"it is {'' if v else 'not '}fragile"
        ),
    },
    "enum": {
        "priority": Parameter(*_one_of("low", "normal", "urgent"), lambda v: f"the priority is {v}"),
        "payment": Parameter(*_one_of("cash", "card", "invoice"), lambda v: f"the payment is by {v}"),
    },
    "object": {
        "address": Parameter(
            {"type": "object", "properties": _OBJECT["address"]},
            lambda rng: {"street": f"{person(rng).split()[1]} Street", "number": rng.randrange(1, 200)},
            lambda v: f"the address is {v['street']}, number {v['number']}",
        ),
        "slot": Parameter(
            {"type": "object", "properties": _OBJECT["slot"]},
            lambda rng: {"day": rng.choice(DAYS), "hour": rng.randrange(8, 19)},
            lambda v: f"the slot is {v['day']}, hour {v['hour']}",
        ),
    },
    "list": {
        "contents": Parameter(_TEXTS, lambda rng: rng.sample(GOODS, 3), lambda v: f"the contents are {_listed(v)}"),
        "notify": Parameter(_TEXTS, lambda rng: rng.sample(FIRST, 2), lambda v: f"the ones to notify are {_listed(v)}"),
    },
}
"""JSON type -> parameters of that type."""
PARAMETERS = {name: one for some in KINDS.values() for name, one in some.items()}
THINGS = {
    "delivery": ("schedule", "cancel"),
    "order": ("place", "track"),
    "repair": ("start", "postpone"),
    "rental": ("open", "extend"),
    "return": ("accept", "reject"),
    "transfer": ("release", "hold"),
}
"""Thing -> the verb that will be asked for, and the one of a function that will not be."""


def converse(
    rng: random.Random, *, asked: int, things: int = 2, kinds: int = 4, changed: float = 1 / 3
) -> Conversation:
    """Generate a conversation.

    Args:
        asked: calls that users ask for.
        things: that cases are about; each has two functions.
        kinds: parameters of a function besides the case, each of another JSON type.
        changed: share of the cases that have an argument changed later.
    """

    def function(verb: str, thing: str) -> Function:
        chosen = rng.sample(list(KINDS), kinds)
        return Function(verb, thing, tuple(rng.choice(list(KINDS[kind])) for kind in chosen))

    pairs = [[function(verb, thing) for verb in THINGS[thing]] for thing in rng.sample(list(THINGS), things)]
    told: list[tuple[float, str]] = []
    turns: list[str] = []
    calls: list[Call] = []
    for i, word in enumerate(rng.sample(CASES, asked + 1)):
        case, f = f"{word}-{rng.randrange(10, 100)}", pairs[i % things][0]
        values = {p: PARAMETERS[p].draw(rng) for p in f.parameters}
        said = [PARAMETERS[p].say(values[p]) for p in rng.sample(f.parameters, len(f.parameters))]
        place = rng.random()
        told.append((place, f"Case {case} ({f.thing}): {', '.join(said)}."))
        if i and rng.random() < changed:
            p = rng.choice(f.parameters)
            old = values[p]
            while values[p] == old:
                values[p] = PARAMETERS[p].draw(rng)
            told.append((rng.uniform(place, 1), f"A change to case {case}: now {PARAMETERS[p].say(values[p])}."))
        turns.append(f"Please {f.verb} the {f.thing} of case {case} now.")
        calls.append({"name": f.name, "arguments": {"case": case} | values})
    start: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{told[0][1]} {turns[0]}"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": calls[0]}],
        },
        {"role": "tool", "name": calls[0]["name"], "tool_call_id": "call00000", "content": '{"done": true}'},
        {"role": "assistant", "content": "Done."},
    ]
    seed = rng.getrandbits(64)

    def more(number: int) -> str:
        return minutes(random.Random(f"{seed}:{number}"))

    functions = [f for pair in pairs for f in pair]
    return Conversation(tuple(rng.sample(functions, len(functions))), start, told[1:], more, turns[1:], calls[1:])


def minutes(rng: random.Random) -> str:
    """Return a user's turn about other things."""
    lines: tuple[Callable[[], str], ...] = (
        lambda: f"{person(rng)} asked {rng.choice(PLACES)} for {rng.choice(GOODS)} on {rng.choice(DAYS)}.",
        lambda: f"The {rng.choice(GOODS)} for {rng.choice(PLACES)} came {rng.randrange(2, 60)} minutes late.",
        lambda: f"{person(rng)} signed for {rng.randrange(2, 90)} boxes at {rng.choice(PLACES)}.",
        lambda: f"{rng.choice(PLACES).capitalize()} is closed on {rng.choice(DAYS)} from {rng.randrange(8, 19)}:00.",
        lambda: f"{person(rng)} and {person(rng)} talked about the {rng.choice(GOODS)} of last {rng.choice(DAYS)}.",
    )
    return " ".join(["For the minutes:", *(rng.choice(lines)() for _ in range(5))])


def chat_text(tokenizer: Any, messages: list[Message], functions: tuple[Function, ...]) -> str:
    """Write messages as the model's chat template does, and the opening of a call, up to the function's name.

    So the assistant has to call, as with `tool_choice="required"` of a server. A template that does not write functions
    gets them, and the form of a call, in the system turn (`TOLD_TO_CALL`).

    Raises:
        DataError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "tools: the tokenizer has no chat template, so nothing says how a call looks; take an instruct model"
        )
    schemas = [f.schema for f in functions]

    def written(name: str) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": {}}}
        whole = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if writes_functions(tokenizer):
            return write_chat(tokenizer, whole, tools=schemas)
        return write_chat(tokenizer, _plain(whole, schemas))

    try:
        one, other = written("a"), written("b")
    except Exception as error:  # templates are programs: Jinja raises what they raise
        raise DataError(
            f"tools: the chat template refuses a conversation with calls: {error}; take another model"
        ) from error
    return one[: next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]


def writes_functions(tokenizer: Any) -> bool:
    """Return whether a chat template writes functions that it is given."""
    schema = Function("schedule", "delivery", ()).schema
    asked = [{"role": "user", "content": "?"}]
    return "schedule_delivery" in write_chat(tokenizer, asked, tools=[schema])


def _plain(messages: list[Message], schemas: list[dict[str, Any]]) -> list[Message]:
    """Return messages without calls and results: those are text of the assistant and of the user."""
    functions = TOLD_TO_CALL.format(functions="\n".join(json.dumps(s) for s in schemas))
    found: list[Message] = []
    for m in messages:
        role, text = m["role"], m["content"]
        if role == "system":
            text += functions
        elif role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        elif calls := m.get("tool_calls"):
            text = f"<tool_call>\n{json.dumps(calls[0]['function'])}\n</tool_call>"
        found.append({"role": role, "content": text})
    return found
