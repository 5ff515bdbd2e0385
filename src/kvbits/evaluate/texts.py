"""Texts to evaluate on: shipped ones, local files, and data sets of the hub.

novel                        the first chapters of Pride and Prejudice, shipped
novel-start, novel-end       its halves: commands evaluate on the first and calibrate on the second
code                         modules of kvbits of November 2026, shipped
FILE.txt, FILE.py, ...       UTF-8 text; the header and footer of a Project Gutenberg file are taken off
wiki*.raw, wiki*.tokens      WikiText, joined as everyone does: one blank line between paragraphs
FILE.jsonl                   one document a line: `text`, or `prefix` + `gold_completion` (C4 excerpts), or `question`
                             and `answer` (GSM8K)
hub:ID[:CONFIG[:SPLIT]]      a data set of the Hugging Face hub with a field `text` (needs `datasets` and network)
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DataError, SpecError
from ..files import home

CHARACTERS_PER_TOKEN = 12
"""More than any tokenizer needs on average: how much text is tokenized for a number of tokens."""
DAY = "2026-01-01"
"""Date of prompts whose chat template asks for today's: a run that continues tomorrow reads the same prompts."""
_SAME_DAY = f"{{% macro strftime_now(format) %}}{DAY}{{% endmacro +%}}"
"""Jinja code before a template. Templates get no functions as arguments, and `+` keeps a line end that follows."""
SPREAD_CHARACTERS = 1 << 24
"""Windows are spread over so much of a text, which is tokenized whole."""


@dataclass(frozen=True)
class Text:
    """A text and where it came from.

    Attributes:
        name: what results call it.
        parts: the texts that it was mixed from.
        whole: SHA-256 of the text that it is a part of, or empty.
    """

    name: str
    content: str
    parts: tuple[Text, ...] = ()
    whole: str = ""

    @property
    def sha256(self) -> str:
        """Digest of the content, in hexadecimal."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def novel() -> str:
    """Return the first chapters of Pride and Prejudice (Jane Austen, 1813; public domain)."""
    return _shipped("pride_and_prejudice.txt")


def code() -> str:
    """Return a program: modules of kvbits as they were on 28 November 2026.

    Every version calibrates on this text, so that two versions make the same calibration of a model, and share pages.
    """
    return _shipped("program.txt")


def _shipped(file: str) -> str:
    return importlib.resources.files("kvbits.evaluate").joinpath(f"data/{file}").read_text(encoding="utf-8")


SHIPPED = {
    "novel": lambda: Text("novel", novel()),
    "novel-start": lambda: novel_start(),
    "novel-end": lambda: novel_end(),
    "code": lambda: Text("code", code()),
}
"""Texts that are always there, by name: prose and a program, which calibrated together serve other texts better than
either.
"""


def novel_start() -> Text:
    """Return the first half of the novel: what is looked at beside a calibration on the second."""
    return halves(Text("novel", novel()))[0]


def novel_end() -> Text:
    """Return the second half of the novel: what a command calibrates on that looks at its first pages."""
    return halves(Text("novel", novel()))[1]


def first_half_of_novel(text: Text) -> Text:
    """Return the novel's first half for the novel, and any other text as it is: its second half is calibrated on."""
    return novel_start() if text.content == novel() else text


def halves(text: Text) -> tuple[Text, Text]:
    """Return a text's first and second half: what is measured on one is confirmed on the other."""
    middle = len(text.content) // 2
    return (
        Text(f"{text.name}-start", text.content[:middle], whole=text.sha256),
        Text(f"{text.name}-end", text.content[middle:], whole=text.sha256),
    )


def mixed(texts: Sequence[Text]) -> Text:
    """Return several texts as one to calibrate on, which gives each as many windows; one as it is.

    Raises:
        SpecError: no text, or one twice.
    """
    if len({t.sha256 for t in texts}) < max(len(texts), 1):
        raise SpecError(f"texts {', '.join(t.name for t in texts) or '(none)'}: name at least one, and each once")
    return (
        texts[0]
        if len(texts) == 1
        else Text("+".join(t.name for t in texts), "\n\n".join(t.content for t in texts), tuple(texts))
    )


def read_text(source: str) -> Text:
    """Return the text a source names (see the module).

    Raises:
        SpecError: no such file, not UTF-8, a JSON line without text, or no `datasets` package for a hub id.
    """
    if source in SHIPPED:
        return SHIPPED[source]()
    if source.startswith("hub:"):
        return Text(source[4:].replace("/", "--").replace(":", "-"), _hub(source[4:]))
    path = home(source, "text")
    try:
        raw = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise SpecError(f"text {source} is not UTF-8 text: {e}") from e
    except OSError as e:
        raise SpecError(
            f"text {source}: {e.strerror or e}; give a file, {', '.join(f'`{name}`' for name in SHIPPED)}, or"
            " hub:ID[:CONFIG[:SPLIT]]"
        ) from e
    if path.suffix == ".jsonl":
        raw = "\n\n".join(_document(source, i, line) for i, line in enumerate(raw.split("\n")) if line.strip())
    elif path.name.startswith("wiki"):
        raw = "\n\n".join((line + "\n") if line.strip() else "" for line in raw.removesuffix("\n").split("\n"))
    else:
        raw = _without_gutenberg(raw)
    if not raw.strip():
        raise SpecError(f"text {source} holds no text")
    return Text(path.stem, raw)


def _document(source: str, number: int, line: str) -> str:
    try:
        data = json.loads(line)
        if "question" in data and "answer" in data:
            return f"{data['question']}\n{data['answer']}"
        return str(data["text"]) if "text" in data else str(data["prefix"]) + str(data["gold_completion"])
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise SpecError(
            f"text {source}: line {number + 1} holds no `text`, `prefix` and `gold_completion`, or `question` and"
            f" `answer` ({e!r})"
        ) from e


def _without_gutenberg(raw: str) -> str:
    start = re.search(r"\*\*\* ?START OF [^\n]*\n", raw)
    end = re.search(r"\*\*\* ?END OF ", raw)
    return raw[start.end() if start else 0 : end.start() if end else len(raw)].strip("\n\ufeff") + "\n"


def _hub(name: str) -> str:
    try:
        import datasets
    except ImportError as e:
        raise SpecError(
            "a hub: text needs the package `datasets`; run `pip install datasets`, or give a local file"
        ) from e
    repo, *rest = name.split(":")
    config, split = (rest[0] or None) if rest else None, rest[1] if len(rest) > 1 else "test"
    try:
        rows = datasets.load_dataset(repo, config, split=split)
    except Exception as e:  # datasets raises many kinds: no network, no such id, no such split
        raise SpecError(
            f"cannot load {name!r} from the hub: {type(e).__name__}: {' '.join(str(e).split())[:200]}; give a local"
            " file"
        ) from e
    if "text" not in rows.column_names:
        raise SpecError(f"data set {name!r} has no field `text`; it has {', '.join(rows.column_names)}")
    return "\n\n".join(rows["text"])


def bos_of(tokenizer: Any) -> list[int]:
    """Return [BOS] if the tokenizer begins texts with it, else []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def write_chat(tokenizer: Any, messages: Sequence[dict[str, Any]], **how: Any) -> str:
    """Return messages as a chat template writes them, on every day the same: `strftime_now` gives `DAY`.

    Args:
        how: `tools`, `add_generation_prompt`, as `apply_chat_template` takes them.
    """
    template = tokenizer.get_chat_template(tools=how.get("tools"))
    return str(tokenizer.apply_chat_template(messages, chat_template=_SAME_DAY + template, tokenize=False, **how))


def windows(tokenizer: Any, text: Text, *, count: int, length: int, limit: int | None = None) -> torch.Tensor:
    """Return the first `count` windows of a text, without overlap, each beginning with BOS if the tokenizer uses one.

    Args:
        limit: tokens the model was made for (`geometry.max_context`).

    Returns:
        int64 [count, length].

    Raises:
        DataError: the text is too short, or windows are longer than the model's positions.
    """
    return _cut(tokenizer, text, count, length, limit, CHARACTERS_PER_TOKEN * count * length)[:count]


def spread_windows(
    tokenizer: Any, text: Text, *, count: int, length: int, limit: int | None = None
) -> dict[int, torch.Tensor]:
    """Return `count` windows spread evenly over a text, by their number among all windows of the text: each int64
    [length], as `windows` gives them.

    The first is the text's first, the second its middle, then its quarters and so on: more windows only add to fewer.

    Raises:
        DataError: as `windows`.
    """
    found = _cut(tokenizer, text, count, length, limit, SPREAD_CHARACTERS)
    return {i: found[i] for i in spread(len(found), count)}


def spread(total: int, count: int) -> list[int]:
    """Return `count` of `total` numbers, in the order of van der Corput's sequence: however many are taken, they are
    spread evenly.
    """
    digits = total.bit_length()
    halved = (int(f"{k:0{digits}b}"[::-1], 2) * total >> digits for k in range(1 << digits))
    return list(dict.fromkeys(halved))[:count]


def _cut(tokenizer: Any, text: Text, count: int, length: int, limit: int | None, characters: int) -> torch.Tensor:
    """Return all windows of the first `characters` of a text, at least `count`: int64 [windows, length]."""
    if count < 1 or length < 2:
        raise SpecError(f"{count} windows of {length} tokens; at least 1 of 2 are needed")
    if limit is not None and length > limit:
        raise DataError(f"windows of {length} tokens pass the model's {limit} positions; lower --length")
    start = bos_of(tokenizer)
    body = length - len(start)
    ids = torch.tensor(
        tokenizer(text.content[:characters], add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64
    )
    if len(ids) < count * body:
        raise DataError(
            f"text {text.name!r} has {len(ids)} tokens, but {count} windows of {length} need {count * body}; ask for"
            " fewer or shorter windows, or give a longer text"
        )
    found = ids[: len(ids) // body * body].view(-1, body)
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(found), -1), found], 1)
