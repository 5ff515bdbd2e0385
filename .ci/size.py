"""Prints tokens and lines of the Python source by room, compared with another commit.

    python .ci/size.py [COMMIT]          the point where this branch left origin/main, or main, if not given; else HEAD~

Tokens are those of the tokenizer without comments, docstrings, line ends and indentation, so formatting cannot change
them; a code line is a line with at least one token. No number is a limit.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src", "tests", "benchmarks", "studies", "docs", "examples")
SKIPPED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def size(text: str) -> tuple[int, int]:
    """Count (tokens, code lines) of a Python source, as far as it can be tokenized."""
    tokens, lines = 0, set()
    try:
        for t in tokenize.generate_tokens(io.StringIO(text).readline):
            docstring = t.type == tokenize.STRING and t.line.strip().startswith(('"""', 'r"""'))
            if t.type not in SKIPPED and not docstring:
                tokens += 1
                lines.add(t.start[0])
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass
    return tokens, len(lines)


def room(path: str) -> str:
    """Name the room of a file: src/kvbits/cache/pool.py is in "src/cache", tests/test_cli.py in "tests"."""
    parts = path.removeprefix("src/kvbits/").split("/")
    if path.startswith("src/"):
        return f"src/{parts[0]}" if len(parts) > 1 else "src, top level"
    return parts[0]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def base_of(given: list[str]) -> str:
    """Return the commit to compare with, or "" where there is none."""
    if given:
        if not git("rev-parse", "--verify", "--quiet", f"{given[0]}^{{commit}}"):
            raise SystemExit(f"{given[0]} is not a commit here; name one, or leave it away")
        return given[0]
    head = git("rev-parse", "HEAD").strip()
    for branch in ("origin/main", "main"):
        if (found := git("merge-base", "HEAD", branch).strip()) and found != head:
            return found
    return git("rev-parse", "--verify", "--quiet", "HEAD~").strip()


def here() -> dict[str, str]:
    """Text of every Python file of the working tree that git knows or does not ignore."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "--", *(f"{p}/*.py" for p in PLACES))
    paths = [p for p in dict.fromkeys(listed.split("\n")) if p and (ROOT / p).exists()]
    return {p: (ROOT / p).read_text(encoding="utf-8", errors="replace") for p in paths}


def there(commit: str) -> dict[str, str]:
    """Text of every Python file of a commit."""
    listed = git("ls-tree", "-r", "--name-only", commit, "--", *PLACES).split("\n")
    return {p: git("show", f"{commit}:{p}") for p in listed if p.endswith(".py")}


def rooms(files: dict[str, str]) -> Counter[tuple[str, str]]:
    """Sum tokens and lines: (room, "tokens" or "lines") -> number."""
    found: Counter[tuple[str, str]] = Counter()
    for path, text in files.items():
        tokens, lines = size(text)
        names = [room(path)] + ["src"] * path.startswith("src/")
        for name in names:
            found[name, "tokens"] += tokens
            found[name, "lines"] += lines
    return found


def table(now: Counter[tuple[str, str]], before: Counter[tuple[str, str]]) -> str:
    lines = [f"{'room':24}{'tokens':>10}{'change':>10}{'code lines':>12}{'change':>9}{'tokens a line':>15}"]
    for name in sorted({name for name, _ in [*now, *before]}):
        tokens, code = now[name, "tokens"], now[name, "lines"]
        lines.append(
            f"{name:24}{tokens:>10,}{tokens - before[name, 'tokens']:>+10,}{code:>12,}"
            f"{code - before[name, 'lines']:>+9,}{tokens / max(1, code):>15.1f}"
        )
    return "\n".join(lines)


def main(given: list[str]) -> None:
    base = base_of(given)
    now = rooms(here())
    if not base:
        print("no commit to compare with; changes are 0")
    print(f"Python by room, compared with {base[:12] or 'itself'}:\n{table(now, rooms(there(base)) if base else now)}")


if __name__ == "__main__":
    main(sys.argv[1:])
