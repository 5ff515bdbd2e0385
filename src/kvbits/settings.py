"""Settings of commands: dataclasses whose fields state their meaning, limits and default once.

    @dataclass(frozen=True, kw_only=True)
    class Bench(Output):
        rounds: int = setting(20, "Times that each is timed, in turn.", least=1)

`cli.common.command` makes options of the fields, and settings of the options that are given.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_type_hints

from .errors import SpecError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Option:
    """Way in which a command line sets a field.

    Attributes:
        help: what the field is.
        names: those of the option, if not made of the field's.
        argument: it has a place instead of a name.
        least, most: of a number.
        tokens: the fewest tokens of a field that counts them; then a text like "8k" is understood.
        shown: what help calls the default. Nothing reads it.
        metavar: what help calls the value.
        read: makes the value of a text, or of several where `many`; gets the option's name first.
        many: it may be given several times.
    """

    help: str
    names: tuple[str, ...] = ()
    argument: bool = False
    least: int | None = None
    most: int | None = None
    tokens: int | None = None
    shown: str | None = None
    metavar: str | None = None
    read: Callable[[str, Any], Any] | None = None
    many: bool = False


def setting(default: Any, help: str, *names: str, **how: Any) -> Any:
    """Return a dataclass field with its `Option`; the default `...` makes it required."""
    given = {} if default is ... else {"default": default}
    if isinstance(default, dict):
        given = {"default_factory": default.copy}
    return dataclasses.field(**given, metadata={"option": Option(help, names, **how)})


def options_of(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return (field, type) by name of all fields that have an option, own ones before inherited ones. A field that is
    settings itself has its fields in its place.
    """
    hints, fields = get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for name in dict.fromkeys(name for base in cls.__mro__ for name in inspect.get_annotations(base)):
        if dataclasses.is_dataclass(hints[name]):
            found |= options_of(hints[name])
        elif name in fields and "option" in fields[name].metadata:
            found[name] = fields[name], hints[name]
    return found


def made(cls: type[T], given: dict[str, Any]) -> T:
    """Make settings of the values of all options. None stands for the default.

    Raises:
        SpecError: an invalid value.
    """
    hints, values = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = made(hints[field.name], given)
        elif (value := given.get(field.name)) is not None:
            option: Option = field.metadata["option"]
            values[field.name] = value if option.read is None else option.read(name_of(field), value)
    return cls(**values)


def name_of(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field's option."""
    names = field.metadata["option"].names
    return str(names[0]) if names else f"--{field.name.replace('_', '-')}"


def names_in(option: str, given: str | Iterable[str]) -> list[str]:
    """Return what a comma-separated option names; given several times, it adds up.

    Raises:
        SpecError: the option names nothing.
    """
    texts = [given] if isinstance(given, str) else list(given)
    names = [n.strip() for text in texts for n in text.split(",") if n.strip()]
    if not names:
        raise SpecError(f"{option} {' '.join(map(repr, texts))} names nothing; give names, comma-separated")
    return names


def once(option: str, given: Iterable[T]) -> tuple[T, ...]:
    """Refuse a value that an option names twice."""
    found = tuple(given)
    if repeated := [one for one in found if found.count(one) > 1]:
        raise SpecError(f"{option} {repeated[0]} is given {found.count(repeated[0])} times; give it once")
    return found
