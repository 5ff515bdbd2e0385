"""Fixtures of the CPU kernel tests, for the study that has kernels of its own; and the checkout's root, where studies
are imported from.
"""

import sys
from pathlib import Path

from ops.conftest import tier  # noqa: F401

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
