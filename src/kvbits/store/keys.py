"""Names of token prefixes: a chain of hashes. Equal prefixes of equal caches have equal names, whoever computes them.

    key of no token        SHA-256 of the namespace (`Identity`)
    key of blob i          SHA-256 of the key before and of its token ids (int64, little-endian)

vLLM's prefix cache does the same. The first 20 bytes of a key are in the header of its blob.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..cache.blob import Identity
from ..errors import DataError

KEY_BYTES = 20


def token_ids(ids: Any) -> np.ndarray:
    """Make int64 [tokens] of a list, array or tensor [tokens] or [1, tokens].

    Raises:
        DataError: several sequences, no whole numbers, or some above 2**63 - 1.
    """
    try:
        x = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    except (TypeError, NotImplementedError) as error:  # tensors of dtypes that NumPy has not, or without data
        raise DataError(
            f"token ids must be whole numbers [tokens] or [1, tokens], got {ids.dtype} on {ids.device}"
        ) from error
    except ValueError as error:  # NumPy's, of lists of different lengths
        raise DataError(
            "token ids must be whole numbers [tokens] or [1, tokens], got lists of different lengths; store one"
            " sequence at a time"
        ) from error
    if x.ndim == 2 and len(x) == 1:
        x = x[0]
    if x.ndim != 1 or (x.size and x.dtype.kind not in "iu"):
        held = "text" if x.dtype.kind == "U" else f"{x.dtype} {list(x.shape)}"
        raise DataError(
            f"token ids must be whole numbers [tokens] or [1, tokens], got {held}; tokenize a prompt first, and store"
            " one sequence at a time"
        )
    if x.dtype.kind == "u" and x.size and (largest := int(x.max())) >= 1 << 63:
        raise DataError(
            f"token id {largest} is above 2**63 - 1 = {(1 << 63) - 1}; pass ids as signed 64-bit whole numbers"
        )
    return np.ascontiguousarray(x, "<i8")


def namespace(identity: Identity, blob_tokens: int) -> str:
    """Return the folder of the blobs that go together: hexadecimal digits of whose pages they are, for all shards."""
    i = identity
    numbers = (i.rope, i.layers, i.page_size, i.kv_heads * i.shards, blob_tokens)
    return hashlib.sha256(b"kvbits" + i.scheme + i.model + i.calibration + repr(numbers).encode()).hexdigest()[:40]


def first(space: str, extra: bytes = b"") -> bytes:
    """Compute the key of no token in a namespace.

    Args:
        extra: names what a prompt consists of besides its token ids; prompts of other `extra` share no key.
    """
    seed = hashlib.sha256(space.encode()).digest()
    return hashlib.sha256(seed + b"extra" + extra).digest() if extra else seed


def after(key: bytes, ids: np.ndarray) -> bytes:
    """Compute the key of a prefix that continues with these tokens."""
    return hashlib.sha256(key + ids.tobytes()).digest()


def chain(space: str, ids: np.ndarray, ends: Iterable[int], extra: bytes = b"") -> list[bytes]:
    """Compute the key of no token, and the keys of the tokens up to each end."""
    keys, start = [first(space, extra)], 0
    for end in ends:
        keys.append(after(keys[-1], ids[start:end]))
        start = end
    return keys
