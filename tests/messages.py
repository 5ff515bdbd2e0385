"""Messages of errors, warnings and programs, checked by what they name: a value, a limit, a way out.

Tests do not pin the sentences around these parts.
"""

import re

import pytest


def mentions(text, *parts):
    """Return whether a text has all these parts, in any order, none of them within a longer word or number."""
    return re.search(_naming(parts), text) is not None


def raises(error, *parts):
    """Expect an exception whose message `mentions` these parts."""
    return pytest.raises(error, match=_naming(parts))


def warns(category, *parts):
    """Expect a warning whose message `mentions` these parts."""
    return pytest.warns(category, match=_naming(parts))


def _naming(parts):
    return r"(?s)\A" + "".join(rf"(?=.*{_whole(str(part))})" for part in parts)


def _whole(part):
    """A number is not the end of a path or of a negative number."""
    before = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", part) else ""
    if re.fullmatch(r"\d[\d.,]*", part):
        before = r"(?<![\w/-])(?<!\d[.,])"
    after = r"(?!\w|[.,]\d)" if re.search(r"\w\Z", part) else ""
    return before + re.escape(part) + after
