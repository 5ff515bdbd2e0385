"""Pages in place of SGLang's pool of keys and values: `KVBitsPool`, and what of SGLang asks for it."""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar, NoReturn

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ...errors import UnsupportedError
from ...spec import PageLayout
from ..engine.call import RAW_DTYPES
from ..engine.rings import beside_copies
from ..engine.served import FORMATS, PAGE_SIZE, Format, copied_requests
from .options import REQUESTS, format_of, options_of

logger = logging.getLogger(__name__)
_COPIED: dict[int, int] = {}
"""Requests that have copies, by the id of SGLang's configurator, which takes no attributes."""


class KVBitsPool(MHATokenToKVPool):
    """Slot s is token s % 64 of page s // 64; nobody owns page 0, which takes what padding writes.

    Attributes:
        layout: of a page.
        model_dtype: of what layers give; `dtype` is what is stored, bytes.
        pages: of each layer uint8 [pages, H, head_bytes].
        copied: requests that have copies at once.
        loaded: int64 [n] each: slots that came from host memory since the last step. Copies of their pages are of past
            owners.
    """

    form: ClassVar[Format]
    copied: ClassVar[int]
    dtype: torch.dtype

    def _create_buffers(self) -> None:
        self.model_dtype, self.dtype = self.dtype, torch.uint8
        self.layout: PageLayout = self.form.layout(
            self.head_num, self.head_dim, self.v_head_dim, RAW_DTYPES[self.model_dtype]
        )
        shape = (self.size // PAGE_SIZE + 1, self.head_num, self.layout.head_bytes)
        self.pages = [torch.zeros(shape, dtype=torch.uint8, device=self.device) for _ in range(self.layer_num)]
        self.loaded: list[torch.Tensor] = []

    def _clear_buffers(self) -> None:
        del self.pages

    def pages_of(self, layer_id: int) -> torch.Tensor:
        """Return a layer's pages, once HiCache has loaded those of this step."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return self.pages[layer_id - self.start_layer]

    def get_kv_size_bytes(self) -> int:
        return sum(x.nbytes for x in self.pages)

    def _refused(self, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(
            "kvbits' pages have no keys and values apart, and only kvbits' attention backend reads and writes them"
        )

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Check that accepted drafts are where they belong (`drafts`), and move nothing."""
        # waits for nothing
        torch._assert_async(
            (tgt_loc == src_loc).all(),
            "an accepted draft is not the next of a chain; this is a bug of the kvbits plugin",
        )

    set_kv_buffer = get_key_buffer = get_value_buffer = get_kv_buffer = get_raw_kv_buffer = _refused
    get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = get_device_pool_infos = _refused


def page_of(slots: torch.Tensor) -> torch.Tensor:
    """Return the pages of slots that come in whole pages, int64 [slots / 64]."""
    return slots[::PAGE_SIZE] // PAGE_SIZE


@functools.cache
def _class_of(form_name: str, copied: int) -> type[KVBitsPool]:
    return type("KVBitsPool", (KVBitsPool,), {"form": FORMATS[form_name], "copied": copied})


def pool_class(original: Any, configurator: Any, *, kind: str, default: type) -> type:
    """Wrap `KVCacheConfigurator._resolve_kv_pool_class`, which is asked for every kind of pool, whichever the model
    has.
    """
    form = format_of(configurator.server_args)
    if form is None or kind != "mha":
        return original(configurator, kind=kind, default=default)
    return _class_of(form.name, _COPIED.get(id(configurator), 0))


def _layout(form: Format, configurator: Any) -> PageLayout:
    """Return pages of a layer of a rank."""
    config, args = configurator.model_config, resolved_view(configurator.server_args)
    heads, raw_dtype = config.get_num_kv_heads(args.tp_size), RAW_DTYPES[configurator.kv_cache_dtype]
    return form.layout(heads, config.head_dim, config.v_head_dim, raw_dtype)


def cell_size(original: Any, sizes: Any, configurator: Any, num_layers: int) -> int:
    """Wrap `DefaultPoolConfigurator._compute_cell_size`: bytes of a token in all layers of a rank."""
    if (form := format_of(configurator.server_args)) is None:
        return original(sizes, configurator, num_layers)
    return num_layers * _layout(form, configurator).page_size_bytes // PAGE_SIZE


def budget(original: Any, configurator: Any, pre_model_load_memory: int) -> int:
    """Wrap `KVCacheConfigurator._profile_available_bytes`: without what copies take, whose number is decided here."""
    form, found = format_of(configurator.server_args), original(configurator, pre_model_load_memory)
    if form is None or not (options := options_of(form)).copies:
        return found
    of_layer = sum(ring.nbytes for ring in options.rings(form, _layout(form, configurator)))
    of_request = configurator.layer_info.num_effective_layers * of_layer
    most = resolved_view(configurator.server_args).max_running_requests or REQUESTS
    _COPIED[id(configurator)] = copied = copied_requests(found, of_request, most, options.copies_share)
    return beside_copies(logger, copied, most, of_request, found)
