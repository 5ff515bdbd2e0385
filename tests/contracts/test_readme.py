"""The README is a door: few words, short lines, subjects first."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()
MOST_WORDS, MOST_WORDS_BEFORE_A_RESULT, MOST_CHARACTERS = 1200, 300, 200


def test_the_readme_is_short():
    words = README.split()
    assert len(words) <= MOST_WORDS, f"{len(words)} words, tables and code included"


def test_the_first_lines_that_run_come_first():
    first = README[: README.index("```", README.index("```python") + 3)]
    assert len(first.split()) <= MOST_WORDS_BEFORE_A_RESULT


def test_its_lines_are_short():
    long = [line for line in README.splitlines() if len(line) > MOST_CHARACTERS and not line.startswith("|")]
    assert not long, long


def test_no_sentence_begins_with_of():
    assert not re.findall(r"(?:^|[.:;] |\n|- )Of [a-z0-9].{0,40}", README)
