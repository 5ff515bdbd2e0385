"""Torch dtypes that stand for vLLM's cache dtypes (`served.FORMATS`), and the pages of each.

vLLM asks a backend for page sizes with nothing but a torch dtype (`customize_spec`). The backend has no name and no
layer then, and in vLLM's workers no configuration. So each format has a torch dtype of its own as a tag, which no other
cache uses. The model's own dtype means raw pages.
"""

from __future__ import annotations

import functools

import torch

from ...errors import UnsupportedError
from ...ops import dispatch
from ...spec import PageLayout
from ..engine.automatic import AUTO
from ..engine.call import RAW_DTYPES
from ..engine.served import FORMATS, LISTED, RAW, SCHEME, Format

TAGS = {
    "kvbits_int8": torch.int8,
    "kvbits_int8_centered": torch.int16,
    "kvbits_int8k_int4v": torch.int32,
    "kvbits_int4": torch.int64,
    "kvbits_klt4": torch.uint32,
    "kvbits_klt3": torch.uint64,
    "kvbits_klt2": torch.complex32,
}
"""Name of a format -> torch dtype under which vLLM hands page specs to `customize_spec`; `tag_for` gives others one."""
NAMES = (*FORMATS, SCHEME, AUTO)
"""Every dtype that vLLM takes. An engine's configuration has `AUTO` only until its format is chosen."""
SHOWN = (*LISTED, SCHEME, AUTO)
"""Dtypes that help and messages show."""
HEADS = "kvbits_int8_centered"
"""Format of layers of speculation that have no files to be calibrated by (EAGLE, MTP), or that a scheme file says
nothing of: few layers, of any model.
"""
PLACEHOLDER = torch.bool
"""Tag of layers that have not been told their format yet."""
_BY_TAG = {tag: FORMATS[name] for name, tag in TAGS.items()} | dict.fromkeys(RAW_DTYPES, RAW)
_SPARE_TAGS = (
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    *(getattr(torch, f"{kind}{bits}") for kind in ("uint", "int") for bits in range(1, 8)),
)
"""For formats that only a scheme file has."""


def tag_for(form: Format) -> torch.dtype:
    """Return the torch dtype that stands for a format in this process.

    Raises:
        UnsupportedError: more different formats than there are dtypes.
    """
    specs = form.scheme.key, form.scheme.value
    same = [tag for tag, f in _BY_TAG.items() if (f.scheme.key, f.scheme.value) == specs]
    if not (tags := same + [tag for tag in _SPARE_TAGS if tag not in _BY_TAG]):
        raise UnsupportedError(
            f"a scheme file with more than {len(_SPARE_TAGS)} formats that are not kvbits dtypes; use fewer"
        )
    _BY_TAG.setdefault(tags[0], form)
    return tags[0]


def form_of(kv_cache_dtype: str, model_dtype: torch.dtype) -> Format:
    """Return the format of a layer by the name of its dtype ("auto" and the model's own: `RAW`).

    Raises:
        UnsupportedError: a dtype that is none of these.
    """
    form = RAW if kv_cache_dtype in ("auto", RAW_DTYPES[model_dtype]) else FORMATS.get(kv_cache_dtype)
    if form is None:
        raise UnsupportedError(
            f"kv_cache_dtype={kv_cache_dtype!r} is not a format of kvbits; known: auto, {', '.join(LISTED)}"
        )
    return form


def layout_by_tag(dtype: torch.dtype, num_kv_heads: int, head_dim: int, value_head_dim: int) -> PageLayout:
    """Return pages of a layer by the torch dtype that vLLM has for it.

    Raises:
        UnsupportedError: a torch dtype that stands for no format.
    """
    if dtype not in _BY_TAG:
        raise UnsupportedError(f"pages of {dtype} are not a format of kvbits; known: auto, {', '.join(LISTED)}")
    return _BY_TAG[dtype].layout(num_kv_heads, head_dim, value_head_dim, RAW_DTYPES.get(dtype, "bfloat16"))


@functools.lru_cache(maxsize=64)
def refuses_pages(kv_cache_dtype: str, head_dim: int, raw_dtype: str) -> str | None:
    """Return why GPUs have no kernels for pages of this name and width, or None.

    For a scheme file the result is None: each layer is asked when it has its format.
    """
    if kv_cache_dtype == SCHEME:
        return None
    found = dispatch.natives(FORMATS.get(kv_cache_dtype, RAW).layout(1, head_dim, head_dim, raw_dtype))
    why = next(
        (why for op in ("store", "decode", "unpack") if (why := found.get(op, {}).get("cuda"))),
        None,
    )
    return why and f"{why}; use vLLM's own dtypes"
