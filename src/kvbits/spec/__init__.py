"""Description of what is stored: number formats, who shares a scale, schemes, and the exact bytes of everything.

Arithmetic only (no tensors, no torch). Every size in the library comes from here, so the planner's figure and the
pool's allocation cannot drift apart. docs/reference/formats.md pictures the byte layouts that `PageLayout` describes.

    QuantSpec   how one tensor (keys or values) becomes codes           spec.quant
    PageLayout  the bytes of one page                                   spec.layout
    Scheme      key spec + value spec + sinks + raw tail + overrides    spec.scheme
    CacheSpec   scheme + model geometry -> layer groups -> bytes        spec.cache
    FittedScheme   a Scheme that belongs to one model                   spec.fitted

All specs are frozen, keyword-only and validated at birth; `repr` is constructor text; `to_json` / `from_json`
round-trip.
"""

from .bands import BAND
from .bands import PLANES as BAND_PLANES
from .cache import CacheSpec, LayerGeometry, LayerGroup
from .codec import from_dict, to_dict, whole
from .fitted import FittedScheme
from .layout import (
    DTYPE_BYTES,
    FORMATS_VERSION,
    KEY_TILE,
    SECTION_ALIGNMENT,
    STRUCT_ALIGNMENT,
    VALUE_BLOCK,
    VALUE_TOKEN_ORDER,
    PageLayout,
    Section,
    plane_row_bytes,
)
from .quant import (
    FORMATS,
    FRAME,
    MEAN_STEP,
    OFFSETS,
    SCALE_8BIT,
    Granularity,
    NumberFormat,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
)
from .rotary import Rotary
from .scheme import MOST_TOKENS, Copies, Override, Scheme, Tier

__all__ = [
    "BAND",
    "BAND_PLANES",
    "DTYPE_BYTES",
    "FORMATS",
    "FORMATS_VERSION",
    "FRAME",
    "KEY_TILE",
    "MEAN_STEP",
    "MOST_TOKENS",
    "OFFSETS",
    "SCALE_8BIT",
    "SECTION_ALIGNMENT",
    "STRUCT_ALIGNMENT",
    "VALUE_BLOCK",
    "VALUE_TOKEN_ORDER",
    "CacheSpec",
    "Copies",
    "FittedScheme",
    "Granularity",
    "LayerGeometry",
    "LayerGroup",
    "NumberFormat",
    "Override",
    "PageLayout",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "QuantSpec",
    "Rotary",
    "Scheme",
    "Section",
    "Tier",
    "from_dict",
    "plane_row_bytes",
    "to_dict",
    "whole",
]
