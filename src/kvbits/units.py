"""Sizes as people write them: bytes with their unit, tokens in thousands of 1,024, dtypes by their short names.

No torch.

GB is 10**9 bytes, GiB is 2**30, and every text says which. Tokens follow the field: 8k is 8,192, 1M is 1,048,576.
"""

from __future__ import annotations

import re

from .errors import SpecError

GB = 10**9
GIB = 2**30

_BYTES = (
    {"B": 1}
    | {p + "B": 1000**n for n, p in enumerate("KMGT", 1)}
    | {p + "IB": 1024**n for n, p in enumerate("KMGT", 1)}
)
_TOKENS = {"": 1, "k": 2**10, "m": 2**20}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_MOST = 2**63
_NUMBER = re.compile(r"([0-9]{1,20}(?:,[0-9]{3}){0,6})(?:\.([0-9]{1,20}))?\s*([A-Za-z]*)")


def parse_bytes(text: str, what: str = "memory") -> int:
    """Return bytes of "24GB" (10**9), "24GiB" (2**30), "512 MiB", "1.5TB".

    Args:
        what: names the number in messages.

    Raises:
        SpecError: anything else: "24" has no unit, and "24G" could mean either.
    """
    match, text = _NUMBER.fullmatch(text.strip()), _shown(text)
    if match is None or match[3].upper() not in _BYTES:
        raise SpecError(
            f"{what} {text!r} is not understood; write it with its unit, like 75GB (75 x 10**9 bytes) or 75GiB (75 x"
            " 2**30), above 0"
        )
    if match[3].endswith("b") and match[3][:1].isupper():
        raise SpecError(f"{what} {text!r}: {match[3]} are bits; write {match[3][:-1]}B for bytes")
    nbytes = _scaled(match, _BYTES[match[3].upper()])
    if not 1 <= nbytes < _MOST:
        few = "is less than a byte" if nbytes < 1 else "is more than any machine has"
        raise SpecError(f"{what} {text!r} {few}; write it like 24GB")
    return nbytes


def parse_tokens(text: str, what: str = "tokens", *, least: int = 1) -> int:
    """Return the number of tokens of "8192", "8,192", "8k" (8 x 1,024), "1M" (2**20).

    Raises:
        SpecError: anything else, a part of a token, or fewer than `least`.
    """
    match, text = _NUMBER.fullmatch(text.strip()), _shown(text)
    unit = None if match is None else _TOKENS.get(match[3].lower())
    if match is None or unit is None or _scaled(match, unit) * 10 ** len(match[2] or "") != int(_digits(match)) * unit:
        raise SpecError(
            f"{what} {text!r} is not a number of tokens; write a whole number from {least} on, like 8192 or 8k (8 x"
            " 1,024)"
        )
    if (n := _scaled(match, unit)) < least:
        raise SpecError(f"{what} {text!r} is less than {least}; write a number from {least} on, like 8192 or 8k")
    if n >= _MOST:
        raise SpecError(f"{what} {text!r} are more than any model takes; write 8192 or 8k (8 x 1,024)")
    return n


def dtype_name(dtype: object) -> str:
    """Give torch's name of a dtype or of its name: "bf16" is "bfloat16", "fp16" or "half" "float16", "fp32" "float32";
    other names are left as they are.
    """
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name.strip().lower(), name)


def human_bytes(n: float) -> str:
    """Return bytes in GB (10**9 bytes) or smaller decimal units."""
    for unit, size in (("TB", 10**12), ("GB", GB), ("MB", 10**6), ("kB", 1000)):
        if n >= size:
            return f"{n / size:,.2f} {unit}"
    return f"{n:.0f} B"


def _shown(text: str) -> str:
    """Cut a text that is much longer than any number, for messages."""
    return text if len(text) <= 60 else f"{text[:60]}.."


def _digits(match: re.Match[str]) -> str:
    return match[1].replace(",", "") + (match[2] or "")


def _scaled(match: re.Match[str], unit: int) -> int:
    """Return the number in units of one, rounded down."""
    return int(_digits(match)) * unit // int(10 ** len(match[2] or ""))


def written_tokens(n: int) -> str:
    """Return tokens as `parse_tokens` reads them: 4096 is "4k", 3000 stays."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def human_seconds(seconds: float) -> str:
    """Return a time as people say it: "40 s", "3 minutes", "1.5 hours"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"
