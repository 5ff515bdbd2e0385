"""Specs to plain JSON data and back, with the class name under "type"."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from typing import Any, TypeVar

from ..errors import KvbitsError, SpecError

_TYPES: dict[str, type] = {}
T = TypeVar("T")


def serialisable(cls: type[T]) -> type[T]:
    """Let `from_dict` make this class (a class decorator)."""
    _TYPES[cls.__name__] = cls
    return cls


def choice(what: str, value: object, known: Any) -> None:
    """Raise SpecError, listing the known values, unless `value` is one of them."""
    if value not in list(known):  # a list, because a value from JSON may not be hashable
        raise SpecError(f"unknown {what} {value!r}; known: {', '.join(str(k) for k in known)}")


def whole(name: str, value: Any, least: int, most: int, instead: str = "", error: type[KvbitsError] = SpecError) -> int:
    """Return the whole number `value` as a plain int: 64, not 64.0, True or "64"; NumPy's integers are whole numbers
    too.

    Args:
        name: of the field, in the message.
        least, most: the limits, both allowed.
        instead: what else could be given, in the message.
        error: the class to raise.

    Raises:
        SpecError: (or `error`) with the value, the limits and what to give.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise error(f"{name}={value!r} must be a whole number from {least} to {most}{instead and '; ' + instead}")
    return number


def same_as(name: str) -> Any:
    """Return a dataclass field that is what another one is unless it is given: `fill` gives it that, `to_dict` leaves
    it out, as texts from before it do.
    """
    return dataclasses.field(default=None, metadata={"same_as": name})


def fill(value: Any) -> None:
    """Give the `same_as` fields of a dataclass their values: to be called at its birth."""
    for f in dataclasses.fields(value):
        if "same_as" in f.metadata and getattr(value, f.name) is None:
            object.__setattr__(value, f.name, getattr(value, f.metadata["same_as"]))


def _left_out(value: Any, f: Any) -> bool:
    found = getattr(value, f.name)
    return ("said" in f.metadata and found == f.default) or (
        "same_as" in f.metadata and found == getattr(value, f.metadata["same_as"])
    )


def to_dict(value: Any) -> Any:
    """Return plain JSON data for a spec, with the class name under "type".

    A field with metadata "said" is left out where it is its default, as before it was.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if not _left_out(value, f)]
        return {"type": type(value).__name__} | {f.name: to_dict(getattr(value, f.name)) for f in fields}
    return [to_dict(v) for v in value] if isinstance(value, tuple) else value


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def _fits(value: Any, annotation: str) -> bool:
    """Return whether JSON data may stand for a field of plain numbers or text: 64.0 and true are not whole numbers."""
    if annotation in ("tuple[int, ...]", "tuple[int, ...] | None"):
        return (value is None and "None" in annotation) or (
            isinstance(value, list) and all(type(n) is int for n in value)
        )
    return annotation not in _PLAIN or type(value) in _PLAIN[annotation]


def from_dict(data: Any) -> Any:
    """Return the spec that `to_dict` described.

    Raises:
        SpecError: unknown type or field, or values the spec refuses.
    """
    if isinstance(data, list):
        return tuple(from_dict(v) for v in data)
    if not isinstance(data, dict):
        return data
    fields = dict(data)
    name = fields.pop("type", None)
    choice("spec type", name, _TYPES)
    known = {f.name for f in dataclasses.fields(_TYPES[name])}
    if unknown := set(fields) - known:
        if "rotated" in unknown:
            raise SpecError(
                "the spec was written by an older kvbits: leave out `rotated` (where it is true take klt4 instead), and"
                " write basis='calibrated' for 'klt'"
            )
        if "key_bits" in unknown:
            raise SpecError(
                "the tier was written by an older kvbits: leave out key_bits and value_bits, then it stores 8 bits, or"
                " give specs as key and value"
            )
        raise SpecError(f"{name} has no field {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    if name == "QuantSpec" and fields.get("format") == "raw":
        return _TYPES[name].raw()  # type: ignore[attr-defined]
    if name == "QuantSpec" and fields.get("format") == "banded":
        raise SpecError(
            "the spec was written by an older kvbits, whose 'banded' codes no kernel reads any more; take klt4, klt3 or"
            " klt2 as they are now, or run `kvbits fit` again"
        )
    for f in dataclasses.fields(_TYPES[name]):
        if f.name in fields and not _fits(fields[f.name], str(f.type)):
            raise SpecError(f"{name}.{f.name} is {fields[f.name]!r}, which is not {f.type}")
    try:
        return _TYPES[name](**{k: from_dict(v) for k, v in fields.items()})
    except TypeError as error:  # a field is missing, or holds a value of another kind
        given = ", ".join(sorted(fields)) or "none"
        raise SpecError(f"a {name} with these fields is invalid: {given} ({error})") from error


def parse(text: str, wanted: type) -> Any:
    """Return the spec of type `wanted` that a JSON text describes.

    Raises:
        SpecError: no JSON, another spec, or one that differs from the text's own `sum` (see `dumps`).
    """
    try:
        data = json.loads(text)
        said = data.pop("sum", None) if isinstance(data, dict) else None
        spec = from_dict(data)
    except json.JSONDecodeError as error:
        raise SpecError(f"the text is not JSON ({error}); pass what to_json() returned") from error
    except RecursionError as error:
        raise SpecError("the JSON is nested deeper than any spec; pass what to_json() returned") from error
    if not isinstance(spec, wanted):
        raise SpecError(f"the JSON describes a {type(spec).__name__}, not a {wanted.__name__}")
    if said is not None and said != _sum(spec):
        raise SpecError(
            f"the {wanted.__name__} is damaged or was edited: its values differ from its sum; copy the file again, or"
            ' keep an edit by removing "sum" from the JSON'
        )
    return spec


def dumps(spec: Any) -> str:
    """Return a spec as JSON, with a `sum` by which `parse` notices damage."""
    return json.dumps(to_dict(spec) | {"sum": _sum(spec)})


def _sum(spec: Any) -> str:
    """Return 16 hex digits of the SHA-256 of a spec's fields, in whatever order a text has them."""
    return hashlib.sha256(json.dumps(to_dict(spec), sort_keys=True).encode()).hexdigest()[:16]
