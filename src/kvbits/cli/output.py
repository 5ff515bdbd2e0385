"""Output of the commands, and the streams that they write to.

A terminal may lack characters, be narrow, close early or be full. Characters that an encoding lacks are replaced. A
table is as wide as its longest names and numbers need; where that is too wide, each row becomes a few lines. Standard
output that is lost ends a command without a trace; standard error that is lost is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

PIPE_WIDTH = 220
"""Columns where standard output is not a terminal and $COLUMNS is not set."""
PIPE_CLOSED = 141
"""Exit code where whoever read the output has left, as of a program that SIGPIPE ends."""
NOT_WRITTEN = 2
"""Exit code where the output could not be written."""


LONGEST_NAME = 60
"""Characters of a first cell that is a name; a longer one is prose, which may be broken between words."""


class OutputLost(Exception):
    """Standard output took no more; the cause is the OSError."""


class _Output(io.TextIOWrapper):
    """Standard output, whose errors are told from those of files."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputLost from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputLost from error


class _Errors(io.TextIOWrapper):
    """Standard error: there is nobody to tell that it is lost."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        _discard(2)
        return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            _discard(2)


def _discard(number: int) -> None:
    """Lead a file descriptor nowhere, so that what is still buffered can be flushed."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, number)
    if nowhere != number:
        os.close(nowhere)


def _replaces(encoding: str) -> bool:
    """Return whether an encoding can replace what it lacks; idna, punycode and undefined cannot."""
    try:
        return bool("\u6a21".encode(encoding, "replace"))
    except ValueError:
        return False


def open_streams() -> None:
    """Make the standard streams take any text, whatever state they are in.

    A closed one leads nowhere, so that no file that is opened later gets its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _discard(number)
    for name, number, kind in (("stdout", 1, _Output), ("stderr", 2, _Errors)):
        stream = getattr(sys, name)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        encoding = encoding if _replaces(encoding) else "utf-8"
        lines = number == 2 or bool(stream is not None and stream.isatty())
        raw = stream.detach() if isinstance(stream, io.TextIOWrapper) else open(number, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, kind(raw, encoding=encoding, errors="replace", line_buffering=lines))


def close_streams(code: Any) -> Any:
    """Flush what is left and return the exit code."""
    try:
        sys.stdout.flush()
    except OutputLost as lost:
        code = lose_output(lost)
    sys.stderr.flush()
    return code


def lose_output(lost: OutputLost) -> int:
    """Report that standard output is lost, unless its reader has left; returns the exit code."""
    cause = lost.__cause__
    _discard(1)
    if getattr(cause, "errno", None) == errno.EPIPE:
        return PIPE_CLOSED
    tell(f"error: standard output: {getattr(cause, 'strerror', None) or cause}")
    return NOT_WRITTEN


def tell(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def width() -> int:
    """Return the number of columns that lines may take."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def show(*things: Any) -> None:
    """Write texts and tables to standard output; no name or number of them is cut."""
    for thing in things:
        write("\n".join(lines_of(thing, width())))


def lines_of(thing: Any, columns: int) -> list[str]:
    """Return a text or a table as lines."""
    if not hasattr(thing, "columns"):  # a text, or one of rich's
        text = str(getattr(thing, "plain", thing))
        return [line for part in text.split("\n") for line in wrapped(part, columns)]
    return _drawn(thing, columns) if _fits(thing, columns) else _rows(thing, columns)


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """Break a line between words; a word that is longer than the line stays whole."""
    from rich.cells import cell_len

    lead = text[: len(text) - len(text.lstrip(" "))]
    if cell_len(text) <= columns or len(text.split()) < 2:
        return [text]
    lines: list[str] = []
    now = ""
    for word in text.split():
        longer = f"{now} {word}" if now else (lead if not lines else indent) + word
        if now and cell_len(longer) > columns:
            lines.append(now)
            longer = indent + word
        now = longer
    return [*lines, now]


def _longest(text: str, whole: bool) -> int:
    """Return the number of cells of the longest part that no line may break."""
    from rich.cells import cell_len

    parts = text.split("\n") if whole else text.split()
    return max((cell_len(p) for p in parts), default=0)


def _needs(table: Table) -> list[int]:
    """Return cells that each column needs: its first and its numbers are not broken at all."""
    found = []
    for i, column in enumerate(table.columns):
        texts = [str(c) for c in column.cells]
        names = i == 0 and len(table.columns) > 1 and all(len(t) <= LONGEST_NAME for t in texts)
        cells = [_longest(t, names or column.justify == "right") for t in texts]
        found.append(max([*cells, _longest(str(column.header), False)]))
    return found


def _beside(table: Table) -> int:
    """Return the cells of a row that are edges and blanks."""
    return 3 * len(table.columns) + 1 if table.box is not None else 2 * len(table.columns)


def _fits(table: Table, columns: int) -> bool:
    return sum(_needs(table)) + _beside(table) <= columns


def _widths(table: Table, columns: int) -> list[int]:
    """Return the cells of each column: those that it needs, and what room is left to columns that lack least."""
    found = _needs(table)
    room = columns - _beside(table) - sum(found)
    lacks = [
        max(_longest(str(text), True) for text in (column.header, *column.cells)) - need
        for column, need in zip(table.columns, found, strict=True)
    ]
    for i in sorted(range(len(found)), key=lambda i: lacks[i]):
        more = max(0, min(lacks[i], room))
        found[i] += more
        room -= more
    return found


def _drawn(table: Table, columns: int) -> list[str]:
    from rich.console import Console

    stated = [column.width for column in table.columns]
    for column, cells in zip(table.columns, _widths(table, columns), strict=True):
        column.width, column.overflow = column.width or cells, "fold"
    title, caption = table.title, table.caption
    table.title = table.caption = None
    plain = not str(getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    into = io.StringIO()
    console = Console(
        file=into, width=columns, markup=False, emoji=False, highlight=False, color_system=None, legacy_windows=plain
    )
    table.safe_box = plain
    console.print(table)
    table.title, table.caption = title, caption
    for column, before in zip(table.columns, stated, strict=True):
        column.width = before
    head = [line for part in str(title or "").split("\n") if part for line in wrapped(part, columns)]
    body = [line.rstrip() for line in into.getvalue().rstrip("\n").split("\n")]
    return [*head, *body, *(wrapped(str(caption), columns) if caption else ())]


def _rows(table: Table, columns: int) -> list[str]:
    """Return a table as lines: each row its first cell, and under it the others by name."""
    from rich.cells import cell_len

    found = [line for part in str(table.title or "").split("\n") if part for line in wrapped(part, columns)]
    names = [" ".join(str(c.header).split()) for c in table.columns]
    for cells in zip(*(list(c.cells) for c in table.columns), strict=True):
        first, *others = (str(c) for c in cells)
        found += [line for part in first.split("\n") for line in wrapped(part, columns)]
        for name, cell in zip(names[1:], others, strict=True):
            if not cell.strip():
                continue
            text = f"  {name}: {' '.join(cell.split())}" if name else f"  {' '.join(cell.split())}"
            if cell_len(text) <= columns or not name:
                found += wrapped(text, columns, "    ")
            else:
                found += wrapped(f"  {name}:", columns, "  ")
                found += wrapped(f"    {' '.join(cell.split())}", columns, "    ")
    return found + (wrapped(str(table.caption), columns) if table.caption else [])
