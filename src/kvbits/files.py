"""Where results are to go, looked at before the work, not after it; and what they are as JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from .errors import SpecError


def require_file(path: str | os.PathLike[str], what: str) -> Path:
    """The path, if a file can be there.

    Args:
        what: names the option or operation in the message.

    Raises:
        SpecError: a directory is there, or the directory it would be in is not.
    """
    found = Path(path)
    if found.is_dir():
        raise SpecError(f"{what} {os.fspath(path)!r} is a directory; name a file in it")
    if not found.parent.is_dir():
        raise SpecError(f"{what} {found}: the directory {found.parent} does not exist; create it first")
    return found


def require_folder(path: str | os.PathLike[str], what: str) -> Path:
    """The path, if a folder is or can be made there.

    Raises:
        SpecError: it, or what it would be in, is a file.
    """
    found = Path(path)
    for part in (found, *found.parents):
        if part.exists() and not part.is_dir():
            raise SpecError(f"{what} {found}: {part} is a file; name a folder")
    return found


def to_json(data: Any, *, indent: int | None = None, compact: bool = False) -> str:
    """Data as JSON, which has no NaN or infinity: they become null.

    Args:
        compact: no spaces after commas and colons.
    """
    return json.dumps(_finite(data), allow_nan=False, indent=indent, separators=(",", ":") if compact else None)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
