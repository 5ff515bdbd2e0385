"""Messages of errors and warnings, checked by what they name: a value, a limit, a way out. Sentences may change."""

import re

import pytest


def raises(error, *parts):
    """Expect an exception whose message has all these parts, in any order."""
    return pytest.raises(error, match=_naming(parts))


def warns(category, *parts):
    """Expect a warning whose message has all these parts, in any order."""
    return pytest.warns(category, match=_naming(parts))


def _naming(parts):
    r"""Return a regular expression for texts that have all parts, none of them within a longer word or number."""
    return r"(?s)\A" + "".join(rf"(?=.*{_whole(str(part))})" for part in parts)


def _whole(part):
    before = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", part) else ""
    after = r"(?!\w|[.,]\d)" if re.search(r"\w\Z", part) else ""
    return before + re.escape(part) + after
