"""Cache factories: every way to store keys and values that an evaluation compares, behind one interface.

    base      the stock Transformers cache in the model's own dtype ("16-bit", or "32-bit" for a float32 model)
    presets   `KVCache` with a named scheme, through the real packed pages
    stock     the quantized caches that Transformers ships (quanto, HQQ, fp8)
    simulated presets quantized and dequantized into a dense cache, to compare with the packed one
    caches    those of a Python file (`read_caches`), which may be of any kind

A factory makes fresh caches; `held_bytes` counts what any of them really holds.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import schemes as presets
from ..errors import SpecError, UnsupportedError
from ..integrations.huggingface import KVCache
from ..integrations.models import scheme_for
from ..model_ref import ModelRef
from ..runs import without_folder
from ..spec import QuantSpec, Scheme, to_dict
from .simulated import SimulatedCache

if TYPE_CHECKING:
    from ..calibrate import Calibration

STOCK: dict[str, dict[str, Any]] = {
    "quanto4": {"backend": "quanto", "nbits": 4, "axis_key": 0, "axis_value": 0},
    "quanto2": {"backend": "quanto", "nbits": 2, "axis_key": 0, "axis_value": 0},
    "hqq8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "hqq4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hqq2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "stock_fp8": {"backend": "fp8"},
}
"""Transformers' own quantized caches, with the axes its documentation gives each backend; groups of 64 and a residual
of 128 are its defaults.
"""

GROUPS = presets.GROUPS | {"stock": tuple(STOCK)}
"""Names of groups that an evaluation knows (see `schemes.expand`)."""


@dataclass(frozen=True)
class CacheFactory:
    """Factory of fresh caches of one kind.

    Attributes:
        name: what results call it.
        kind: "base", "kvbits", "stock" or "simulated".
        make: (batch_size, max_tokens) -> a fresh Transformers cache; None for both: one that grows.
        info: JSON data about it: bits per element, the scheme and the heads' sizes, calibration.
        scheme: what it stores, if it is ours.
        stores_padding: whether padding would be quantized like tokens: such caches get one prompt at a time.
    """

    name: str
    kind: str
    make: Callable[[int | None, int | None], Any]
    info: dict[str, Any] = field(default_factory=dict)
    scheme: Scheme | None = None
    stores_padding: bool = False


Caches = Mapping[str, Callable[[Any], CacheFactory]]
"""Caches from outside: name -> what makes the factory of that name for a model."""


def read_caches(path: Path) -> Caches:
    """Import the Python file `path` and return its mapping `CACHES` (benchmarks/peers.py is an example).

    Raises:
        SpecError: the file cannot be read or run, or `CACHES` is not such a mapping.
    """
    name = f"kvbits_caches_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path) if path.suffix == ".py" and path.is_file() else None
    if found is None or found.loader is None:
        raise SpecError(f"{path} is not a Python file; --caches takes one such as benchmarks/peers.py")
    module = sys.modules[name] = importlib.util.module_from_spec(found)  # classes look their module up by name
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise SpecError(f"{path} does not run: {type(error).__name__}: {error}") from error
    caches = getattr(module, "CACHES", None)
    if not isinstance(caches, Mapping) or not caches or not all(map(callable, caches.values())):
        raise SpecError(f"{path} has no mapping CACHES from names to functions of a model; benchmarks/peers.py has one")
    return caches


def expand(names: Iterable[str | Scheme], caches: Caches) -> list[str | Scheme]:
    """Return schemes and names of caches with groups written out; the group `caches` has those from outside.

    Raises:
        SpecError: as `schemes.expand`, or a cache from outside has a name that is in use or that a file cannot have.
    """
    used = {*GROUPS, *(name for members in GROUPS.values() for name in members), "caches", "16-bit", "32-bit"}
    if bad := [name for name in caches if name in used or "/" in name or name.startswith(".") or not name]:
        raise SpecError(
            f"a cache of your own is called {bad[0]!r}; results go by names: give it one that no other has and that a"
            " file can have"
        )
    return presets.expand(names, GROUPS | {"caches": tuple(caches)})


def is_ours(name: str | Scheme, caches: Caches) -> bool:
    """Return whether this is a scheme of ours, rather than a stock cache or one from outside."""
    return name not in STOCK and name not in caches


def base_factory(model: Any) -> CacheFactory:
    """Return the stock cache in the model's own dtype: what everything is compared with."""
    from transformers import DynamicCache

    bits = torch.finfo(model.dtype).bits
    return CacheFactory(
        f"{bits}-bit",
        "base",
        lambda batch, tokens: DynamicCache(config=model.config),
        {"bits_per_element": float(bits)},
    )


def factory(
    model: Any,
    name: str | Scheme,
    *,
    calibration: Callable[[Scheme], Calibration] | None = None,
    simulate: bool = False,
    caches: Caches | None = None,
) -> CacheFactory:
    """Make the factory of a preset, a scheme of your own, a stock quantized cache, or a cache from outside.

    Args:
        calibration: gives the calibration of a scheme that needs one.
        simulate: quantize and dequantize into a dense cache instead (see `evaluate.simulated`), named NAME-simulated.
        caches: those from outside.

    Raises:
        SpecError: an unknown name, a scheme that does not fit the model, or a cache from outside of an unknown kind.
        UnsupportedError: a stock cache that this model or installation cannot have; or a scheme that needs a
            calibration and gets none.
    """
    if isinstance(name, str) and name in STOCK:
        return _stock(model, name)
    if isinstance(name, str) and caches and name in caches:
        return _from_outside(caches[name](model), name)
    ref = ModelRef.of(model)
    scheme = scheme_for(ref, name)
    found = None
    if scheme.needs_calibration:
        if calibration is None:
            raise UnsupportedError(
                f"scheme {scheme.name!r} needs a calibration; give --calibration-text FILE (not one you evaluate on) or"
                " others"
            )
        found = calibration(scheme)

    def make(batch: int | None, tokens: int | None) -> KVCache:
        return KVCache.for_model(model, scheme, batch_size=batch, max_tokens=tokens, calibration=found)

    store = make(1, 1).pages
    spec = store.spec
    head_dims = list(dict.fromkeys(g.head_dim for g in ref.layers))
    info = {"bits_per_element": spec.bits_per_element, "scheme": to_dict(scheme), "head_dims": head_dims}
    if found:
        # people send results in: they name no folder of this machine
        known = {name: without_folder(x) if name == "model" else x for name, x in found.info.items()}
        info["calibration"] = known | {"id": found.id}
    if not simulate:
        return CacheFactory(scheme.name, "kvbits", make, info, scheme)
    static = store.static
    SimulatedCache(spec, static, store.device)  # refuses what cannot be simulated
    return CacheFactory(
        f"{scheme.name}-simulated",
        "simulated",
        lambda batch, tokens: SimulatedCache(spec, static, store.device),
        info,
        scheme,
        True,
    )


def _from_outside(made: Any, name: str) -> CacheFactory:
    if not isinstance(made, CacheFactory) or made.name != name or made.kind not in ("stock", "simulated"):
        raise SpecError(
            f"CACHES[{name!r}] returned {made!r}; it must return a CacheFactory of that name whose kind is stock or"
            " simulated"
        )
    return made


def _stock(model: Any, name: str) -> CacheFactory:
    from transformers import QuantizedCache

    options = STOCK[name]

    def make(batch: int | None, tokens: int | None) -> Any:
        return QuantizedCache(config=model.config, **options)

    try:
        make(1, 1)
    except (ImportError, ValueError) as error:
        raise UnsupportedError(
            f"stock cache {name!r} cannot serve this model here: {' '.join(str(error).split())}"
        ) from error
    return CacheFactory(
        name,
        "stock",
        make,
        {"bits_per_element": None, "source": "transformers.QuantizedCache", "options": options},
        None,
        True,
    )


def sides(scheme: Scheme) -> list[Scheme]:
    """Return NAME-keys and NAME-values: a scheme whose values, or keys, stay raw.

    None of one with tiers, or with raw keys or values itself.
    """
    if scheme.tiers or scheme.key.is_raw or scheme.value.is_raw:
        return []

    def alone(kept: str, raw: dict[str, Any]) -> Scheme:
        return replace(
            scheme,
            name=f"{scheme.name}-{kept}",
            overrides=tuple(replace(o, **raw) for o in scheme.overrides),
            copies=tuple(replace(c, **raw) for c in scheme.copies),
            **raw,
        )

    return [alone("keys", {"value": QuantSpec.raw()}), alone("values", {"key": QuantSpec.raw()})]


def held_bytes(cache: Any) -> int:
    """Return bytes of all tensors a cache holds: codes, scales, zero points, residuals; for `KVCache`, everything
    allocated.
    """
    if isinstance(cache, KVCache):
        return cache.nbytes
    seen: dict[int, int] = {}
    for layer in cache.layers:
        _tensors(vars(layer), seen)
    return sum(seen.values())


def _tensors(value: Any, seen: dict[int, int]) -> None:
    """Collect the storage bytes by storage address of every tensor inside dicts, sequences, tensor subclasses."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for v in value:
            _tensors(v, seen)
        return
    if not isinstance(value, torch.Tensor):
        return
    inner = getattr(value, "__tensor_flatten__", None)
    if inner is not None and type(value) is not torch.Tensor:
        for name in inner()[0]:
            _tensors(getattr(value, name), seen)
        return
    if value.numel():
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = max(seen.get(storage.data_ptr(), 0), math.prod(value.shape) * value.element_size())
