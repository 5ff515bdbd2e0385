"""Once per layer: store the step's tokens in their pages, then attend."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...ops import dispatch, store
from ...ops.types import store_of
from ...quant.basis import for_copies
from .call import Call, Sink
from .step import Step


@dataclass(eq=False)
class Layer:
    """One attention layer's tokens and queries. What a step needs is compiled here.

    Attributes:
        name: by which plans know it.
        copies: pages of each of `call.rings`, uint8 [copies, H, head_bytes]; none before `take_copies`.
        static: calibrated parameters of pages (`PageStore.static`), then of each ring's copies.
        order: of stored channels, int64 [D]; None where it is the model's.
        turn: by how much keys turn from a page to the next (`quant.rotary.turn_by`); None where nobody knows: means
            then start as they are.
        sink: a learned one.
    """

    name: str
    call: Call
    device: torch.device
    copies: tuple[torch.Tensor, ...] = ()
    static: tuple[dict[str, torch.Tensor], ...] = field(default=(), init=False)
    order: torch.Tensor | None = field(default=None, init=False)
    turn: torch.Tensor | None = None
    sink: Sink = None

    def __post_init__(self) -> None:
        layouts = [self.call.layout, *(ring.layout for ring in self.call.rings)]
        self._writes = [store.choose(layout, self.call.dtype, self.device) for layout in layouts]
        # prompts behind a history unpack
        reads = [dispatch.choose("unpack", layout, self.call.dtype, self.device) for layout in layouts]
        for choice in (*self._writes, *reads):
            choice.prepare()
        self.calibrate({}, None)

    def calibrate(self, static: dict[str, torch.Tensor], order: torch.Tensor | None) -> None:
        """Take the calibrated parameters of pages, from which those of copies are made, and the order of channels."""
        own, self.order = self.call.layout.key, order
        copies = (ring.layout.key for ring in self.call.rings)
        self.static = (static, *({} if key.is_raw else for_copies(static, own, key) for key in copies))

    def take_copies(self, count: int) -> None:
        """Allocate copies for so many requests, if they are not there."""
        shapes = [(count * ring.pages, ring.layout.num_kv_heads, ring.layout.head_bytes) for ring in self.call.rings]
        if [tuple(x.shape) for x in self.copies] != shapes:
            self.copies = tuple(torch.zeros(shape, dtype=torch.uint8, device=self.device) for shape in shapes)

    def run(
        self,
        step: Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        pages: torch.Tensor,
        lender: Layer | None = None,
    ) -> None:
        """Attend with query [N, Hq, D], key [N, H, D], value [N, H, Dv], out [N, Hq, Dv], written; of more tokens than
        the step's only the first count.

        Args:
            pages: uint8 [pages, H, head_bytes].
            lender: whose pages these are; then nothing is stored.
        """
        prefill, n, d = step.prefills.get(self.call), step.num_tokens, step.num_decode_tokens
        static, copies = self.static, (lender or self).copies
        plain = self.order is None or prefill is None or not prefill.has_history  # fresh keys are read as they came
        stored, asked = key, query
        if self.order is not None:
            asked, stored = query[: d if plain else n, ..., self.order], key[:n, ..., self.order]
        if lender is None:
            self._store(stored[:n], value[:n], pages, step)
        if d:
            step.decodes[self.call].run(asked[:d], out[:d], self.name, pages, copies, static, self.sink)
        if prefill:
            q, k = (query, key) if plain else (asked, stored)
            end = d + prefill.num_tokens
            prefill.run(self.call, q[d:end], k[d:end], value[d:end], out[d:end], pages, copies, static, self.sink)

    def _store(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, step: Step) -> None:
        to = store_of(pages, self.call.layout, self.static[0], self.turn)
        self._writes[0].run(key, value, to, step.slot_mapping, previous=step.previous_page, starts=step.starts)
        # raw ones last: attention starts while their kernel ends, which writes pages that it reads at its end
        for i in reversed(range(len(self.copies))):
            kept = store_of(self.copies[i], self.call.rings[i].layout, self.static[1 + i])
            self._writes[1 + i].run(key, value, kept, step.copy_slots[i], starts=step.starts)
