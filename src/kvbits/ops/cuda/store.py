"""store on NVIDIA GPUs: keys and values of all sequences in one launch, by the kernel of the pages' family, which reads
slots from the device.
"""

from __future__ import annotations

import functools

import torch

from ...errors import DataError
from ...spec import PageLayout
from ..descriptor import TORCH_NUMBERS
from ..store import check
from ..types import PageStore
from .engine.kernels import too_large
from .engine.runtime import driver
from .families import family_of


def refuses(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why tokens of `dtype` are not stored here in pages of this layout, or None."""
    if why := driver.refuses(device):
        return why
    if dtype not in TORCH_NUMBERS:
        return f"tokens are {dtype}; the kernel takes float32, float16 and bfloat16"
    return refuses_layout(layout, torch.cuda.get_device_capability(device), dtype)


def refuses_layout(
    layout: PageLayout, capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Answer the part of `refuses` that a layout decides, on a device of this compute capability."""
    if not layout.token_local:
        return f"tokens cannot be stored one by one as {layout.key}, {layout.value}"
    if capability < (8, 9) and any(spec.format.startswith("fp8") for spec in (layout.key, layout.value)):
        return f"compute capability {capability[0]}.{capability[1]} cannot round to fp8 (8.9 can)"
    return family_of(layout).stores.refuses_layout(layout, dtype) or _refuses_memory(layout, capability, dtype)


@functools.lru_cache(maxsize=256)
def _refuses_memory(layout: PageLayout, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why a block of a kernel that stores tokens does not fit the shared memory of such a device, or None."""
    sources = family_of(layout).stores.sources(layout, dtype, capability)
    nbytes, limit = max(int(x.macros.get("SHARED_BYTES", 0)) for x in sources), driver.shared_limit(capability)
    return None if nbytes <= limit else too_large([layout], nbytes, limit)


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load what `store` launches, which cannot be done while a CUDA graph is captured."""
    family_of(layout).stores.prepare(layout, dtype, device)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    *,
    previous: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Write tokens in place, see `ops.store`."""
    check(k, v, pages, slots, previous, starts, status)
    for slab in pages.slabs:
        if slab.data_ptr() % 16 or slab.stride(0) % 16:
            raise DataError(
                f"pages at address {slab.data_ptr():#x} with stride {slab.stride(0)}; kernels write 16 bytes at a time:"
                " both must be multiples of 16"
            )
    if len(slots):
        family_of(pages.layout).stores.store(k, v, pages, slots, previous, starts, status)
