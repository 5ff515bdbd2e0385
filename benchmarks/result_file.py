"""Where the benchmarks' results go."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as one line of JSON, the last one; also write it to `out`."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def command() -> str:
    """What was typed, as files of results say it."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
