"""Parts of a prompt besides its token ids: images, sounds, virtual tokens, types and positions of its tokens.

Keys and values depend on all of it, and a store finds them by ids. So `note` writes down what the passes of a cache
were given. `KVCache.from_prefix` computes a prompt from its ids alone, so it refuses ids that stand for something else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import UnsupportedError, counted
from .masks import CACHE_NAMES, Columns

WORDS = re.compile(
    r"_?(bos|eos|pad|sep|cls|unk|mask|eod|blank|question|document|timestamp|assistant|system|user|im_start|im_end"
    r"|decoder_start|begin_suppress|suppress|(\w+_)?forced_\w+|tts_\w+|t2u_\w+|codebook_\w+|validate)"
    r"_(token_id|token_index|token_ids|tokens)"
)
"""Fields of configurations whose token ids stand for text, or for no part of a prompt."""
TOKENS = re.compile(r"\w+_token_(id|ids|index|idx|indices)")
"""Fields of configurations that hold token ids."""
TEXT_INPUTS = frozenset(
    (
        *CACHE_NAMES,
        "attention_mask",
        "cache_params",
        "cache_position",
        "input_ids",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "num_logits_to_keep",
        "position_ids",
        "shift_labels",
        "use_cache",
    )
)
"""Arguments of a forward pass that say no more of a prompt than its ids and lengths do; positions are compared."""
ONLY_IF_SET = re.compile(r"mm_token_type_ids|(\w+_)?(deltas|offsets)")
"""Arguments whose zeros say nothing; a zero in other types of tokens may (GPT-2 adds an embedding, PaliGemma has its
tokens see each other).
"""
MEDIA = re.compile(
    r"\w*(pixel|image|video|audio|vision|visual|speech|input_features|input_values|spectrogram|patches|bbox|cross_att)\w*"
)
"""Arguments of forward passes that bring something other than text."""
MEDIA_FLAGS = re.compile(r"(output_|return_|vision_feature_|use_|interpolate_)\w+")


def media_tokens(config: Any) -> dict[int, str]:
    """List token ids that stand for images, sounds or videos, or for their ends, by a configuration and those inside
    it, each with the name of its field.
    """
    found: dict[int, str] = {}
    for part in _parts(config, set()):
        for name, value in vars(part).items():
            if TOKENS.fullmatch(name) and not WORDS.fullmatch(name):
                for token in value if isinstance(value, (list, tuple)) else [value]:
                    if type(token) is int and token >= 0:
                        found.setdefault(token, name)
    return found


def _parts(config: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a configuration and all inside it."""
    if id(config) in seen:
        return
    seen.add(id(config))
    yield config
    for value in [*vars(config).values()]:
        values: Iterable[Any] = value.values() if isinstance(value, Mapping) else [value]
        for inner in values:
            if isinstance(inner, PretrainedConfig):
                yield from _parts(inner, seen)


def arguments(module: Any) -> Mapping[str, Any]:
    """Return the parameters of a forward pass by name, which hold any name where it takes keywords freely."""
    parameters = inspect.signature(module.forward).parameters
    return _Any(parameters) if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters


class _Any(dict[str, Any]):
    def __contains__(self, name: object) -> bool:
        return True


def takes_media(model: Any) -> list[str]:
    """List arguments of a model's forward pass, or of the model that it wraps, which bring more than text."""
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)
    return [
        name
        for part in dict.fromkeys((model, inner))
        for name in inspect.signature(part.forward).parameters
        if MEDIA.fullmatch(name) and not MEDIA_FLAGS.fullmatch(name)
    ]


def virtual_tokens(model: Any) -> str | None:
    """Return the kind of virtual tokens (PEFT's prompt learning) that a model's active adapter puts in front of a
    prompt.
    """
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    kind = getattr(config, "peft_type", None) if getattr(config, "is_prompt_learning", False) else None
    return None if kind is None else str(getattr(kind, "value", kind))


def fills_itself(model: Any) -> str | None:
    """Return the kind of adapter that writes keys and values into a cache of its own making, which no KVCache is."""
    return kind if (kind := virtual_tokens(model)) in ("PREFIX_TUNING", "CARTRIDGE") else None


def require_no_prefix_tuning(model: Any) -> None:
    """Refuse adapters that write keys and values themselves.

    Raises:
        UnsupportedError: see `fills_itself`.
    """
    if (kind := fills_itself(model)) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has an adapter of PEFT ({kind}) that begins every prompt in a cache of its own"
            " making and drops the one that it is given; use the stock cache, or another adapter (LoRA, prompt tuning)"
        )


def require_words(model: Any, ids: torch.Tensor) -> None:
    """Refuse a prompt whose ids [tokens] stand for more than text.

    Raises:
        UnsupportedError: naming the token and the field of the configuration, or what the model takes besides ids.
    """
    name, tokens = type(model).__name__, media_tokens(model.config)
    way = "use KVCache.for_model, and copy.deepcopy of the filled cache for prompts that begin alike"
    if not tokens and (media := takes_media(model)):
        raise UnsupportedError(
            f"{name} takes {', '.join(media)} besides token ids, and its configuration names no token that stands for"
            f" them, so a prompt with them looks like words; {way}"
        )
    held = torch.isin(ids, torch.tensor([*tokens], dtype=ids.dtype)) if tokens else None
    if held is not None and held.any():
        token = int(ids[held][0])
        raise UnsupportedError(
            f"the prompt holds {counted(int(held.sum()), 'token')} that stand for more than words: id {token} is"
            f" {tokens[token]} of {name}, and from_prefix() computes a prompt from its ids alone; {way}"
        )


def tokens_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a pass is given of each sequence; None where its arguments do not say."""
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    found = next((x for x in given if isinstance(x, torch.Tensor) and x.ndim > 1), None)
    return None if found is None else found.shape[1]


def note(columns: Columns, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Write down in the pages what a pass of a model is given besides ids (`PagedCache.beyond_ids`)."""
    given = dict(kwargs)
    if args:
        given |= dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
    beyond = columns.pages.beyond_ids
    for name, value in given.items():
        if name in TEXT_INPUTS or beyond.get(name) is True or not _holds_tensor(value):
            continue
        if isinstance(value, torch.Tensor) and ONLY_IF_SET.fullmatch(name):
            _add(beyond, name, (value != 0).any())
        else:
            beyond[name] = True
    _note_positions(columns, given, "position_ids" in inspect.signature(module.forward).parameters)


def _note_positions(columns: Columns, given: Mapping[str, Any], takes: bool) -> None:
    """Compare the positions of tokens with their numbers among the real ones. Single tokens on a GPU are taken to
    follow from those before.

    Args:
        takes: the model takes `position_ids`, so that without them it counts padding.
    """
    positions, mask, seen = given.get("position_ids"), given.get("attention_mask"), columns.seen
    if positions is None and takes and isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > seen:
        new = mask.shape[1] - seen
        positions = torch.arange(seen, seen + new, device=mask.device)[None]
    if not isinstance(positions, torch.Tensor) or positions.ndim < 2:
        return
    if (new := positions.shape[-1]) < 2 and positions.device.type != "cpu":
        return
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= seen + new:
        mask = mask[:, : seen + new].to(positions.device).bool()
        usual, real = mask.long().cumsum(1)[:, -new:] - 1, mask[:, -new:]
    elif columns.valid is not None:
        usual = columns.valid.to(positions.device).sum(1, keepdim=True) + torch.arange(new, device=positions.device)
        real = torch.ones_like(usual, dtype=torch.bool)
    else:
        usual = torch.arange(seen, seen + new, device=positions.device)
        real = torch.ones_like(usual, dtype=torch.bool)
    _add(columns.pages.beyond_ids, "position_ids", ((positions != usual) & real).any())


def _add(beyond: dict[str, Any], name: str, found: torch.Tensor) -> None:
    """Add an answer, which stays on a GPU until somebody asks."""
    if name in beyond and not isinstance(beyond[name], bool):
        found = beyond[name] | found
    if found.device.type != "cpu":
        beyond[name] = found
    elif bool(found):
        beyond[name] = True


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_holds_tensor, values))
