"""Once per step: which rows decode from pages and which prefill, and the page before each page that opens.

vLLM puts the rows that decode first. Those of one query length (1, or 1 + the number of speculative tokens) are read by `ops.paged_attention`, whose work
list is made on the device from `seq_lens` and the block table: nothing waits, so their steps are captured in full CUDA graphs and replayed after `build`. All
other rows go through `prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.attention.backend import AttentionMetadata

from ..engine.call import Call
from ..engine.decode import Decode
from ..engine.host_prefill import HostPrefill
from .prefill import Prefill


@dataclass
class KVBitsMetadata(AttentionMetadata):
    """One step of the layers of a KV-cache group.

    Attributes:
        num_tokens: of the step, padding of a graph included.
        num_decode_tokens: the first of them, read by `decodes`; the others by `prefills`.
        slot_mapping: int64 [num_tokens]; below 0: not stored.
        previous_page: int64 [num_tokens] as `store_tokens` takes it; None where pages have no mean.
        starts: int32 [num_tokens] likewise; None where no layer's keys are turned back.
        copy_slots: likewise where tokens go in copies; None without copies.
        positions: int64 [num_tokens] where queries and keys are observed, else None.
    """

    num_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor
    previous_page: torch.Tensor | None
    starts: torch.Tensor | None
    copy_slots: torch.Tensor | None
    decodes: dict[Call, Decode] = field(default_factory=dict)
    prefills: dict[Call, Prefill | HostPrefill] = field(default_factory=dict)
    positions: torch.Tensor | None = None
