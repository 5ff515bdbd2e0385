"""A page to play with: users and tokens that fit a GPU, as bars that move while one drags.

One file, no network; assets/plan.js has the planner's arithmetic.

A scheme's bytes on a model are, over its layer groups,  layers x kv heads x sum over pools of (bytes of a head's struct
                                                         x pages).  The bytes come from
`PageLayout` here; the number of pages is the rule of `LayerGroup.pages_for`, which the script has too. A test holds its
answers equal to those of `kvbits plan`, in a browser.
"""

from __future__ import annotations

import contextlib
import html
import importlib.resources
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from .. import __version__, schemes
from ..config_file import Fields
from ..errors import SpecError
from ..files import to_json
from ..gpus import CARDS, MIB
from ..integrations.engine.served import FORMATS, PAGE_SIZE
from ..model_ref import ModelRef
from ..planner import RESERVE, VLLM_BLOCK, VLLM_DENSE, VLLM_SHOWN, vllm_layouts
from ..spec import CacheSpec, LayerGeometry
from ..spec.cache import LayerGroup
from ..weights import COUNTED, bytes_of_config

PLAIN: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": ("sliding_window",),
    "qwen2": ("use_sliding_window",),
    "qwen3": ("head_dim",),
}
"""Families whose config.json can be pasted into the page, and what the file must state: layers all alike, weights by
one formula.
"""
WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
"""Channels of heads that a pasted model may have."""


Models = Mapping[str, tuple[ModelRef, int]]
"""Models by name: a model, and the bytes of its weights."""


def known() -> Models:
    """Return the models of the list: configurations as their makers state them (assets/models.json)."""
    refs = {name: ModelRef(name, Fields(stated)) for name, stated in json.loads(asset("models.json")).items()}
    return {name: (ref, bytes_of_config(ref)[0]) for name, ref in refs.items()}


class _Formats:
    """Formats of pages as the script takes them, each once."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []

    def number(self, group: LayerGroup) -> int:
        heads = group.geometry.num_kv_heads
        one = {
            "page": group.page_size,
            "residual": group.residual_length,
            "sinks": group.num_sink_tokens,
            "raw": group.fills_pages,
            "heads": {pool: layout.page_size_bytes // heads for pool, layout in group.layouts.items()},
            "tiers": [
                [pool, tier.num_tokens // group.page_size, group.SPECULATED_PAGES]
                for pool, tier in zip(group.tier_pools, group.tiers, strict=True)
            ],
            "copies": [list(x) for x in zip(group.copy_pools, group.copied_pages, strict=True)],
        }
        if one not in self.listed:
            self.listed.append(one)
        return self.listed.index(one)


def _kind(g: LayerGeometry) -> tuple[Any, ...]:
    return g.num_kv_heads, g.head_dim, g.value_head_dim, g.sliding_window


def _schemes(layers: tuple[LayerGeometry, ...], kinds: list[Any], formats: _Formats) -> dict[str, list[list[int]]]:
    """Return [[kind of layer, layers, format], ..] of every core preset that heads of these sizes can have."""
    found = {}
    for name in schemes.CORE:
        with contextlib.suppress(SpecError):
            groups = CacheSpec(scheme=schemes.for_layers(name, layers), layers=layers).groups
            found[name] = [[kinds.index(_kind(g.geometry)), len(g.layers), formats.number(g)] for g in groups]
    return found


def _model(model: ModelRef, weights_bytes: int, formats: _Formats) -> dict[str, Any]:
    kinds = list(dict.fromkeys(map(_kind, model.layers)))
    of_vllm: dict[str, list[Any]] = {}
    for name in VLLM_SHOWN:
        with contextlib.suppress(SpecError):  # a format that heads of this size cannot have
            of_vllm[f"vLLM {name}"] = _blocks(name, model.layers, kinds)
    return {
        "weights": weights_bytes,
        "heads": model.query_heads,
        "longest": model.max_context,
        "state": model.state_bytes,
        "layers": [[sum(_kind(g) == k for g in model.layers), *k] for k in kinds],
        "schemes": _schemes(model.layers, kinds, formats),
        "vllm": of_vllm,
    }


def _blocks(name: str, layers: tuple[LayerGeometry, ...], kinds: list[Any]) -> list[Any]:
    """Return [tokens of a block, [[kind of layer, layers, bytes of a kv head in a block], ...]] of a format in vLLM.

    Raises:
        SpecError: heads of this size cannot have it.
    """
    if name in VLLM_DENSE:
        sizes = [VLLM_BLOCK * VLLM_DENSE[name] * (g.head_dim + g.value_head_dim) for g in layers]
        block = VLLM_BLOCK
    else:
        if why := next((w for g in layers if (w := FORMATS[name].refuses(g.head_dim, g.value_head_dim, False))), None):
            raise SpecError(why)
        pages = vllm_layouts(name, layers, "bfloat16")
        sizes = [x.page_size_bytes // g.num_kv_heads for x, g in zip(pages, layers, strict=True)]
        block = PAGE_SIZE
    found = [(kinds.index(_kind(g)), size) for g, size in zip(layers, sizes, strict=True)]
    return [block, [[k, found.count((k, size)), size] for k, size in dict.fromkeys(found)]]


def plan_data(models: Models) -> dict[str, Any]:
    """Return everything the script counts with, as JSON data."""
    formats = _Formats()
    listed = {name: _model(ref, nbytes, formats) for name, (ref, nbytes) in models.items()}
    widths: dict[int, dict[str, int]] = {}
    for width in WIDTHS:
        layers = (LayerGeometry(num_kv_heads=1, head_dim=width),)
        widths[width] = {name: n for name, ((_, _, n),) in _schemes(layers, [_kind(layers[0])], formats).items()}
    plain = {
        name: {"stated": stated, "qkv_bias": COUNTED[name].qkv_bias, "head_norms": bool(COUNTED[name].head_norms)}
        for name, stated in PLAIN.items()
    }
    return {
        "models": listed,
        "formats": formats.listed,
        "widths": widths,
        "plain": plain,
        "reserve": RESERVE,
        "cards": {name: mib * MIB for name, (_, mib) in CARDS.items()},
        "descriptions": {name: s.description for name, s in schemes.CORE.items()},
        "speed": json.loads(asset("measured.json"))["speed"],
    }


ENGINES = ("Transformers", "vLLM")
"""Programs whose caches the page counts."""
CHARTED = ("int8_centered", "kivi4", "klt4", "klt3", "klt2")
"""Presets that have a bar beside those of 16 bits and of the chosen preset."""


def section(models: Models, *, context: int = 8192, gpus: int = 1, batch: int = 32) -> str:
    """Return the calculator as HTML, its data and script included; the first model is shown.

    Args:
        context, gpus, batch: where the sliders begin; their ends are 128 and 1M tokens, 1 and 256 users.
    """
    shares = [str(n) for n in sorted({1, 2, 4, 8, 16, gpus})]
    at, users = min(max(math.log2(context), 7), 20), min(batch, 256)
    controls = (
        select("plan-model", "model", list(models))
        + select("plan-card", "GPU", list(CARDS), _measured_card(models))
        + select("plan-gpus", "GPUs (tensor parallel)", shares, str(gpus))
        + select("plan-engine", "engine", list(ENGINES))
        + select("plan-preset", "preset", list(schemes.CORE), schemes.RECOMMENDED)
    )
    sliders = _slider("context", "tokens of each user", 7, 20, at, "any") + _slider(
        "batch", "users who share the memory", 1, 256, users, "1"
    )
    data = to_json(plan_data(models) | {"charted": list(CHARTED)}, compact=True).replace("<", "\\u003c")
    return (
        f'<div class="controls">{controls}</div><div class="sliders">{sliders}</div><p id="plan-answer"></p>'
        '<div id="plan-bars" role="img" aria-label="Bars: users that fit, by cache"></div>'
        '<p class="note" id="plan-left"></p><p class="note" id="plan-about"></p>'
        '<div class="wide"><table><thead id="plan-head"></thead><tbody id="plan-rows"></tbody></table></div>'
        f"{_accuracy()}<details><summary>a model that is not listed</summary><label>its config.json<textarea"
        ' id="plan-paste" rows="6"></textarea></label><p class="note" id="plan-paste-says"></p></details>'
        f'{_sources()}<script type="application/json" id="plan-data">{data}</script><script>{asset("plan.js")}</script>'
    )


def _accuracy() -> str:
    """Return the table of presets and their worst KL as HTML."""
    measured = json.loads(asset("measured.json"))["loss"]
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{x['kl']}</td><td>{html.escape(x['model'])}</td><td>{x['models']}</td></tr>"
        for name, x in measured.items()
    )
    missing = [name for name in schemes.CORE if name not in measured]
    left_out = f" Not measured in today's format: {', '.join(missing)}." if missing else ""
    heads = "".join(f"<th scope='col'>{c}</th>" for c in ("preset", "worst KL", "on", "models measured"))
    return (
        "<details><summary>accuracy, measured on small models</summary><p class='note'>KL at 8,192 tokens against the"
        f" same model in 16 bits, in nats. The model above was not measured.{left_out}</p><div class='wide'><table>"
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _sources() -> str:
    """Return the list of where each number comes from as HTML."""
    measured = json.loads(asset("measured.json"))
    found = (
        ("Users, contexts and memory", 'are arithmetic: <code id="plan-command"></code> prints them.'),
        (
            "Caches",
            "count what a cache of fixed capacity allocates on each GPU: whole pages, scales and the newest tokens in"
            " 16 bits. Rows of vLLM count whole blocks, without the copies that klt formats keep of the newest tokens.",
        ),
        (
            "Weights",
            "are counted from the configuration that the maker states, at 2 bytes a number unless it states quantized"
            " ones. The reserve holds activations, the CUDA context and graphs.",
        ),
        (
            "Tokens a second",
            "were measured through Transformers in a CUDA graph, 16 bits with FlashAttention-3:"
            f" <code>{html.escape(measured['speed_from'])}</code>.",
        ),
        ("Accuracy", f"was measured: <code>{html.escape(measured['loss_from'])}</code>."),
    )
    items = "".join(f"<li><strong>{what}</strong> {text}</li>" for what, text in found)
    return f'<h3>Where the numbers come from</h3><ul class="note">{items}</ul><p class="note">GB is 10⁹ bytes.</p>'


def _measured_card(models: Models) -> str:
    """Return the card on which the first model's speed was measured, else the commonest."""
    speed = json.loads(asset("measured.json"))["speed"].get(next(iter(models)), {})
    return str(next(iter(speed), "H100"))


def page(models: Models, *, context: int = 8192, gpus: int = 1, batch: int = 32) -> str:
    """Return the page as HTML text; see `section`."""
    title = "kvbits plan: how many users fit"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{asset("report.css")}</style>'
    )
    body = section(models, context=context, gpus=gpus, batch=batch)
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><header><h1>{title}</h1></header>'
        f"<main>{body}</main><footer>kvbits {__version__}</footer></body></html>\n"
    )


def asset(name: str) -> str:
    text = importlib.resources.files("kvbits.report").joinpath(f"assets/{name}").read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script") if name.endswith(".js") else text


def select(name: str, label: str, options: Iterable[str] | Mapping[str, str], chosen: str = "") -> str:
    """Return a labelled choice among options, or among the values of a mapping to what is shown of them."""
    pairs = options.items() if isinstance(options, Mapping) else zip(options, options, strict=True)
    inner = "".join(
        f'<option value="{html.escape(v)}"{" selected" if v == chosen else ""}>{html.escape(t)}</option>'
        for v, t in pairs
    )
    return f'<label>{html.escape(label)}<select id="{name}">{inner}</select></label>'


def _slider(name: str, label: str, low: int, high: int, value: float, step: str) -> str:
    attributes = f'min="{low}" max="{high}" value="{value}" step="{step}"'
    return (
        f'<label for="plan-{name}">{label}<output id="plan-{name}-is"></output><input type="range" id="plan-{name}"'
        f" {attributes}></label>"
    )
