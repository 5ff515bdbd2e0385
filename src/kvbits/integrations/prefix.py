"""A Transformers cache that begins with what a store has: `KVCache.from_prefix`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..cache.reading import DamagedError
from ..errors import DataError, SpecError, UnsupportedError, counted
from ..files import warn_not_kept
from ..geometry import layer_places, text_config
from ..store import keys
from ..store.prefix_store import PrefixStore
from . import prompts
from .masks import HoldsPages, passed

CHUNK = 512
"""Tokens that go through the model together."""


def beside_pages(layers: int) -> str:
    """Return what files of pages lack of a model in which so many layers keep more than keys and values."""
    return (
        f"{counted(layers, 'layer')} of this model keep recurrent states or index keys, which files of pages do not"
        " hold"
    )


def refuses(model: Any) -> str | None:
    """Return why prefixes of a model cannot be stored: its cache is more than pages, or its prompts more than ids."""
    if (kind := prompts.virtual_tokens(model)) is not None:
        return (
            f"{type(model).__name__} puts virtual tokens ({kind}) in front of each prompt, which no ids name; use"
            " KVCache.for_model, and copy.deepcopy of the filled cache for prompts that begin alike"
        )
    configs = getattr(model, "peft_config", None) or {}
    if any(getattr(c, "alora_invocation_tokens", None) for c in configs.values()):
        return (
            f"an adapter of {type(model).__name__} (aLoRA) begins where its invocation tokens come last in a prompt, so"
            " a prompt's end decides about the keys of its beginning; use KVCache.for_model"
        )
    if model.config.is_encoder_decoder:
        return (
            f"a prompt of {type(model).__name__} goes through its encoder, and its decoder begins anew for each; use"
            " KVCache.for_model"
        )
    if states := sum(p.has_state for p in layer_places(model.config)):
        return (
            f"{beside_pages(states)}: a prefix cannot be cut where no state was kept; use KVCache.for_model, and"
            " copy.deepcopy of a filled cache for prompts that begin alike"
        )
    return None


def require_words(model: Any, ids: Any) -> None:
    """Refuse a prompt whose ids stand for more than text (`prompts.require_words`).

    Raises:
        UnsupportedError: they do.
    """
    prompts.require_words(model, torch.from_numpy(keys.token_ids(ids)))


def fill(
    cache: HoldsPages,
    model: Any,
    ids: Any,
    store: PrefixStore,
    *,
    chunk: int,
    put: bool,
    wait: bool,
    extra: bytes = b"",
) -> int:
    """Load the longest prefix of a prompt into an empty cache of one sequence, and compute the rest of it but the last
    token.

    Args:
        extra: see `KVCache.from_prefix`.
        put: store what was computed.
        wait: for the whole prefix; otherwise its pages come while the first layers run.

    Returns:
        Tokens that were loaded.

    Raises:
        DataError, SpecError: no token; a `chunk` that is not a number of tokens.
        UnsupportedError: a model with longrope and a prompt past its short factors; a prompt that is more than its ids,
            or whose tokens see later ones.
    """
    tokens = keys.token_ids(ids)
    if not len(tokens):
        raise DataError("a prompt of no tokens; pass at least one")
    if type(chunk) is not int or chunk < 1:
        raise SpecError(f"chunk={chunk!r} must be a whole number of tokens, at least 1")
    if (limit := _rotation_limit(model)) is not None and len(tokens) > limit:
        raise UnsupportedError(
            f"a prompt of {len(tokens)} tokens for {type(model).__name__}, which turns all its keys by other angles"
            f" past original_max_position_embeddings={limit}, so no shorter prompt's pages are its beginning; use"
            " KVCache.for_model for it"
        )
    for part in model.modules():  # of the last prompt with images (Qwen2-VL)
        if getattr(part, "rope_deltas", None) is not None:
            part.rope_deltas = None
    known, wanted = cache.pages, tokens[:-1]
    loaded = _load(cache, store, wanted, wait, extra)
    spec = known.spec
    windows = [g.sliding_window for g in spec.layers if g.sliding_window is not None]
    if windows and put:  # a window gives pages back that a shared beginning needs: they are put before
        scheme = spec.scheme
        chunk = min(chunk, max(scheme.page_size, min(windows) - scheme.residual_length - scheme.page_size))
    inputs = torch.from_numpy(wanted).to(known.device)[None]
    computes = model.base_model if _is_plain(model) else model
    how: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(computes.forward).parameters:
        how["logits_to_keep"] = 1
    start = loaded
    with torch.no_grad(), cache.columns.causal_only():
        while start < len(wanted):
            try:
                computes(input_ids=inputs[:, start : start + chunk], **passed(computes, cache), **how)
            except DamagedError:  # found after the first layers had begun; the file is set aside
                cache.reset()
                loaded = start = _load(cache, store, wanted, wait, extra)
                continue
            start = min(start + chunk, len(wanted))
            if cache.get_seq_length() != start or known.beyond_ids:
                raise UnsupportedError(
                    f"{type(model).__name__} puts something in front of the ids of a prompt"
                    f" ({', '.join(known.beyond_ids) or f'{cache.get_seq_length()} tokens for {start} ids'}), which a"
                    " store does not see; use KVCache.for_model"
                )
            if put and windows and start < len(wanted):
                _put(store, known, wanted, end=False, extra=extra)
    if put and len(wanted) > loaded:
        _put(store, known, wanted, extra=extra)
    return loaded


def _put(store: PrefixStore, *what: Any, **how: Any) -> None:
    """Store what is computed. A full disk costs the next prompt its time, and this one nothing."""
    try:
        store.put(*what, **how)
    except OSError as error:
        warn_not_kept("prefixes", error)


def _is_plain(model: Any) -> bool:
    """Return whether a model's forward pass is that of Transformers: another may put something in front of a prompt."""
    return (
        isinstance(model, PreTrainedModel)
        and "forward" not in model.__dict__
        and type(model).forward.__module__.startswith("transformers.")
    )


def _rotation_limit(model: Any) -> int | None:
    """Return the number of tokens up to which a model with longrope takes its short factors; None for others."""
    config = text_config(model.config)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")


def _load(cache: HoldsPages, store: PrefixStore, wanted: np.ndarray, wait: bool, extra: bytes) -> int:
    cache.columns.seen = loaded = store.load(cache.pages, wanted, wait=wait, extra=extra)
    return loaded
