"""The command line: one module per command, registered on `common.app`.

Results go to standard output, everything else (progress, errors) to standard error; with --json standard output holds
exactly one JSON object. An error the library raises on purpose is one line, `error: ...`, and exit code 2. Commands
import what they need when they run, so that help, `schemes` and `plan --layers ...` load neither torch nor
transformers.
"""

from __future__ import annotations

import sys
from typing import Any

from . import bench, calibrate, check, demo, eval, fit, info, plan, report, schemes, warm
from .common import STOPPED, app, leave_now, watch_for_stop
from .output import OutputLost, close_streams, lose_output, open_streams

__all__ = [
    "app",
    "bench",
    "calibrate",
    "check",
    "demo",
    "eval",
    "fit",
    "info",
    "main",
    "plan",
    "report",
    "schemes",
    "warm",
]


def main() -> None:
    """Run the `kvbits` command."""
    open_streams()
    watch_for_stop()
    try:
        app(prog_name="kvbits")
        code: Any = 0
    except SystemExit as e:
        code = e.code
    except OutputLost as lost:
        code = lose_output(lost)
    if code == STOPPED:
        leave_now()
    sys.exit(close_streams(code))
