"""Pages in host memory, in place of SGLang's host pool of keys and values (HiCache): `KVBitsHostPool`.

HiCache writes pages to host memory and loads them into other pages. A page is complete in its own format, so both
directions copy its bytes. Copies of newest pages stay behind: a page that was loaded is read packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.runtime_context import get_memory

from ...errors import UnsupportedError
from ..engine.served import PAGE_SIZE
from .options import HOST_LAYOUT
from .pool import KVBitsPool, page_of


class KVBitsHostPool(HostKVCache):
    """Slot s is token s % 64 of page s // 64, as in `KVBitsPool`.

    Args:
        pool: whose pages are kept.
        ratio: tokens of host memory over those of the device.
        size: gigabytes of 1e9 bytes instead, if it is not 0.

    Attributes:
        kv_buffer: uint8 [layers, pages, H * head_bytes], pinned beside a GPU.

    Raises:
        ValueError: less host memory than that.
    """

    def __init__(self, pool: KVBitsPool, ratio: float, size: int) -> None:
        self._rows = [pages.flatten(1) for pages in pool.pages]
        self.layer_num = self.target_layer_num = len(self._rows)
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=pool.size,
            size_per_token=self._size_per_token(),
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            host_to_device_ratio=ratio,
            host_size=size,
            page_size=PAGE_SIZE,
            layout=HOST_LAYOUT,
            pin_memory=self._rows[0].is_cuda,
            device="cpu",
        )

    def _size_per_token(self) -> int:
        return -(-self.layer_num * self._rows[0].shape[1] // PAGE_SIZE)

    get_size_per_token = get_ksize_per_token = _size_per_token

    def init_kv_buffer(self) -> torch.Tensor:
        shape = (self.layer_num, self.page_num, self._rows[0].shape[1])
        allocate = ALLOC_MEMORY_FUNCS[self._rows[0].device.type]
        return allocate(shape, dtype=torch.uint8, device="cpu", pin_memory=self.pin_memory, allocator=self.allocator)

    def backup_from_device_all_layer(
        self, device_pool: KVBitsPool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        _copy(io_backend, self._rows, device_indices, list(self.kv_buffer), host_indices)

    def load_to_device_per_layer(
        self,
        device_pool: KVBitsPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        if layer_id == 0:
            device_pool.loaded.append(device_indices)  # the stream of a step makes pages of them
        _copy(io_backend, [self.kv_buffer[layer_id]], host_indices, [self._rows[layer_id]], device_indices)

    def _refused(self, *args: Any, **options: Any) -> NoReturn:
        raise UnsupportedError("kvbits' pages are not sent to a storage backend of HiCache; leave it away")

    get_data_page = get_dummy_flat_data_page = set_from_flat_data_page = get_page_buffer_meta = _refused


def _copy(
    io_backend: str,
    sources: Sequence[torch.Tensor],
    source_slots: torch.Tensor,
    targets: Sequence[torch.Tensor],
    target_slots: torch.Tensor,
) -> None:
    """Copy pages of some layers (uint8 [pages, bytes] each) between a device and its host, on the current stream."""
    rows, places = page_of(source_slots), page_of(target_slots)
    if not (sources[0].is_cuda or targets[0].is_cuda):
        for source, target in zip(sources, targets, strict=True):
            target[places] = source[rows]
        return
    from sgl_kernel import kvcacheio

    if io_backend == "direct":
        kvcacheio.transfer_kv_direct(list(sources), list(targets), rows, places, page_size=1)
        return
    for source, target in zip(sources, targets, strict=True):
        kvcacheio.transfer_kv_per_layer_mla(source, target, rows, places, item_size=source.shape[1])


def host_pool(original: Any, *, kv_pool: Any, **options: Any) -> Any:
    """Wrap `build_kv_host_pool`, which HiCache calls for the device's pool."""
    if not isinstance(kv_pool, KVBitsPool):
        return original(kv_pool=kv_pool, **options)
    return KVBitsHostPool(kv_pool, get_memory().hicache_ratio, get_memory().hicache_size)
