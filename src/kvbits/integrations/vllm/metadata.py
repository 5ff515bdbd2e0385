"""A step as vLLM hands it to layers: its runner puts the rows that decode first, and replays captured steps after
`build`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionMetadata

from ..engine.step import Step


@dataclass
class KVBitsMetadata(Step, AttentionMetadata):
    """One step of the layers of a KV-cache group.

    Attributes:
        positions: int64 [num_tokens] where queries and keys are observed, else None.
    """

    positions: torch.Tensor | None = None
