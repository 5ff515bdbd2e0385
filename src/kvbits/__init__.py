"""kvbits: few-bit KV caches for LLM inference.

    cache = kvbits.KVCache.for_model(model)
    model.generate(**inputs, past_key_values=cache)
    print(cache.nbytes, cache.explain())

Importing kvbits imports neither torch nor transformers; each name below loads what it needs when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
RECOMMENDED = "int8_centered"
"""The preset to take without looking further: no calibration, and nearest to 16 bits on every model that was measured,
with and without a key bias (README.md). The default of `KVCache.for_model`, `kvbits check`, lm-eval, and the first of
few bits in the demo.
"""

_HOME = {
    "CacheSpec": "spec",
    "LayerGeometry": "spec",
    "Override": "spec",
    "PerChannel": "spec",
    "PerGroup": "spec",
    "PerTensor": "spec",
    "PerToken": "spec",
    "QuantSpec": "spec",
    "Scheme": "spec",
    "KvbitsError": "errors",
    "schemes": "schemes",
    "PagedCache": "cache.paged_cache",
    "PrefixStore": "store.prefix_store",
    "KVCache": "integrations.huggingface",
    "Calibration": "calibrate",
    "graphed": "integrations.graphs",
    "load_model": "integrations.models",
    "identity": "integrations.identity",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from . import schemes as schemes
    from .cache.paged_cache import PagedCache as PagedCache
    from .calibrate import Calibration as Calibration
    from .errors import KvbitsError as KvbitsError
    from .integrations.graphs import graphed as graphed
    from .integrations.huggingface import KVCache as KVCache
    from .integrations.identity import identity as identity
    from .integrations.models import load_model as load_model
    from .spec import CacheSpec as CacheSpec
    from .spec import LayerGeometry as LayerGeometry
    from .spec import Override as Override
    from .spec import PerChannel as PerChannel
    from .spec import PerGroup as PerGroup
    from .spec import PerTensor as PerTensor
    from .spec import PerToken as PerToken
    from .spec import QuantSpec as QuantSpec
    from .spec import Scheme as Scheme
    from .store.prefix_store import PrefixStore as PrefixStore


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvbits' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    try:
        module = importlib.import_module(f".{_HOME[name]}", __name__)
    except ModuleNotFoundError as e:
        from .errors import to_install

        needs = to_install(e, also="transformers" if _HOME[name].startswith("integrations") else None)
        raise e if needs is None else ModuleNotFoundError(needs, name=e.name) from e
    value = module if name == "schemes" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
