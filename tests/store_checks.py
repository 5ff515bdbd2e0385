"""Caches whose keys and values depend on the tokens alone, as in a model, and everything that a sequence is, for tests
of stores.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from ops.cpu_cases import static_params

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.cache.transfer import shown_part
from kvbits.spec import CacheSpec, LayerGeometry, Rotary

FULL = LayerGeometry(num_kv_heads=2, head_dim=32)
SLIDING = dataclasses.replace(FULL, sliding_window=100)


def spec_of(name="int4", layers=(FULL, FULL), **changes):
    changes = {"residual_length": 16, "page_size": 32, "num_sink_tokens": 4} | changes
    return CacheSpec(scheme=schemes.get(name, head_dim=32, **changes), layers=layers, raw_dtype="float32")


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, n)


def numbers(ids, start, layer, heads, head_dim):
    """Keys and values of tokens that depend on nothing but the ids and positions, as in a model."""
    found = []
    for at in range(start, len(ids)):
        rng = np.random.default_rng([layer, at, int(ids[at]), int(ids[: at + 1].sum())])
        found.append(rng.standard_normal((2, heads, head_dim), np.float32))
    return torch.from_numpy(np.stack(found, 1))[:, None]


def extend(cache, ids, upto, chunk=64):
    """Append tokens of the only sequence up to `upto`, in chunks."""
    at = cache.seq_lens[0] if cache.batch_size else 0
    while at < upto:
        end = min(upto, at + chunk)
        for layer, g in enumerate(cache.spec.layers):
            k, v = numbers(ids[:end], at, layer, g.num_kv_heads, g.head_dim)
            cache.append(layer, k, v)
        at = end
    return cache


def cache_of(spec, ids=None, upto=None, chunk=64, **options):
    cache = PagedCache(spec, backend="reference", **options)
    cache.made_for = "a model"
    return cache if ids is None else extend(cache, ids, len(ids) if upto is None else upto, chunk)


def bytes_of(cache, row=0, copies=True):
    """Everything a sequence is: its integers, and the bytes of its pages as far as it shows them; without `copies`
    those of newest pages are left out.
    """
    found = []
    for g in cache.groups:
        s = g.sequences[row]
        pages = []
        for name, ids in s.pages().items():
            if name in g.group.copy_pools and not copies:
                continue
            for i, page_id in enumerate(ids):
                block, pool = g.pools[name].block(page_id), g.pools[name]
                if name == "sink":
                    block = shown_part(block, pool.layout, min(s.length, g.group.num_sink_tokens))
                if name == "tail":
                    block = shown_part(block, pool.layout, s.tail_lengths[i])
                pages.append((name, block.numpy().tobytes()))
        there = [x is not None for x in s.closed]
        found.append((s.length, s.released, s.dropped, s.closed_lengths, s.tail_lengths, there, s.young, pages))
    return found


SCHEMES = {
    "int4": {},
    "kivi2": {},
    "raw": {},
    "int8_centered": {"residual_length": 0},
    "fp8": {"num_sink_tokens": 0, "page_size": 64},
    "tiered": {"tiers": (dataclasses.replace(schemes.get("tiered").tiers[0], num_tokens=64),)},
}


def pieces(name, layers=(FULL, FULL)):
    """Spec and calibration of a scheme."""
    if name == "token_local":
        return spec_of("int8_centered", layers, token_local=True, residual_length=0), None
    if name == "klt2":
        turned = tuple(
            dataclasses.replace(g, rotary=Rotary(inv_freq=tuple(10_000.0 ** (-i / 16) for i in range(16))))
            for g in layers
        )
        spec = spec_of("klt2", turned)
        return spec, [static_params(spec.scheme.key, spec.scheme.value, 2, 32) for _ in layers]
    return spec_of(name, layers, **SCHEMES[name]), None
