"""Once per layer: store the step's tokens in their pages, then attend."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...ops import dispatch, store
from ...ops.types import PageStore, store_of
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
    static: tuple[dict[str, torch.Tensor], ...] = field(init=False)
    order: torch.Tensor | None = field(init=False)
    turn: torch.Tensor | None = None
    sink: Sink = None

    def __post_init__(self) -> None:
        layouts, dtype = self.call.layouts, self.call.dtype
        self._writes = [store.choose(layout, dtype, self.device) for layout in layouts]
        # prompts behind a history unpack
        reads = [dispatch.choose("unpack", layout, dtype, self.device) for layout in layouts]
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

    def stores(self, pages: torch.Tensor) -> list[PageStore]:
        """Return the layer's pages (uint8 [pages, H, head_bytes]) and the copies of each ring, with what reads them."""
        given = zip((pages, *self.copies), self.call.layouts, self.static, strict=True)
        return [store_of(x, layout, static, self.turn) for x, layout, static in given]

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
        stores = (lender or self).stores(pages)
        plain = self.order is None or prefill is None or not prefill.has_history  # fresh keys are read as they came
        stored, asked, starts = key[:n], query, step.starts
        if self.order is not None:
            asked, stored = query[: d if plain else n, ..., self.order], key[:n, ..., self.order]
        if lender is None:
            slots, previous = step.slot_mapping, step.previous_page
            self._writes[0].run(stored, value[:n], stores[0], slots, previous=previous, starts=starts)
            # raw ones last: attention starts while their kernel ends, which writes pages that it reads at its end
            for i in reversed(range(1, len(stores))):
                self._writes[i].run(stored, value[:n], stores[i], step.copy_slots[i - 1], starts=starts)
        if d:
            step.decodes[self.call].run(asked[:d], out[:d], self.name, stores, self.sink)
        if prefill:
            q, k = (query, key) if plain else (asked, stored)
            end = d + prefill.num_tokens
            prefill.run(q[d:end], k[d:end], value[d:end], out[d:end], stores, self.sink)
