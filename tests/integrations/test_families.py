"""Every family of the registry that `for_model` takes decodes the stock cache's tokens, every other one is refused with
a way out: docs/reference/models.md says the same.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from integrations import families, shrunk
from integrations.families import FAMILIES, TOKENS
from nightly import at_night
from packaging.version import Version

from kvbits.cache.paged_cache import PagedCache
from kvbits.calibrate import observe
from kvbits.errors import CalibrationError
from kvbits.geometry import layer_geometries
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.masks import passed

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="families and their attention change with Transformers"
)


@dataclass
class Built:
    """A tiny model, and what `for_model` says to it."""

    family: families.Family | None
    model: Any
    dense: bool
    why: str | None


@pytest.fixture(
    scope="module",
    params=[*FAMILIES[::2], *at_night(*FAMILIES[1::2], *families.others())],
    ids=lambda f: (
        f if isinstance(f, str) else f"{f.config.removesuffix('Config')}-{re.sub('[^A-Za-z0-9]+', '-', f.names)[:24]}"
    ),
)
def built(request):
    kind = request.param
    with families.quiet():
        if isinstance(kind, str):
            model = shrunk.build(kind, families.ATTENDING.get(kind, {}))
            return Built(None, model, *families.said(model))
        model = families.build(kind)
        return Built(kind, model, *families.said(model))


def test_a_refusal_has_a_way_out(built):
    if built.family is None:
        assert built.why is None
        assert built.dense == (families.verdict(built.model.config.model_type) == "dense")
    if built.why is not None:
        assert "stock cache" in built.why
        assert built.model.config.get_text_config(decoder=True)._attn_implementation == "eager"


def test_raw_decodes_the_stock_tokens(built):
    if built.why is not None:
        return
    model = built.model
    with families.quiet():
        cache = KVCache.for_model(model, "raw", dense=built.dense)
        call, held = families.inputs(model)
        call |= {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        got = model.generate(**call, past_key_values=cache)
        if built.family is not None:  # where padding is stored like any token
            assert cache.pages.seq_lens == ([max(held)] * 2 if built.dense else held)
        KVCache.detach(model)
        want = model.generate(**call)
    assert torch.equal(got, want)
    if built.family is not None:  # no model that says one thing for ever
        assert len(set(want[0, -TOKENS:].tolist())) > (1 if model.config.is_encoder_decoder else 5)


def test_an_attached_model_computes_the_same_with_other_caches_and_without_one(built):
    """Without padding, so that masks may be left out."""
    if built.why is not None or built.dense:
        return
    model = built.model
    with families.quiet(), torch.no_grad():
        KVCache.detach(model)
        call = families.inputs(model, padded=False)[0]
        decoded = families.PROMPT_OF_DECODER if model.config.is_encoder_decoder else {}
        want = model(**call, **decoded, use_cache=False).logits
        tokens = model.generate(**call, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        KVCache.for_model(model, "raw")
        for use_cache in (False, True):
            got = model(**call, **decoded, use_cache=use_cache).logits
            assert (got - want).norm() <= 1e-4 * want.norm()
        again = model.generate(**call, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        KVCache.detach(model)
    assert torch.equal(again, tokens)


def test_calibration_watches_what_generation_computes(built, monkeypatch):
    if built.why is not None or built.model.main_input_name != "input_ids":
        return
    model, computed, ids = built.model, {}, families.ids_of_text()
    layers = set(range(len(layer_geometries(model.config))))
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.data.fill_(3.0)
    step, append = PagedCache.step, PagedCache.append

    def stepping(pages, layer, q, k, v, **options):
        if not options["again"]:
            computed[layer] = q, k, v
        return step(pages, layer, q, k, v, **options)

    def appending(pages, layer, k, v, **options):
        computed[layer] = None, k, v
        return append(pages, layer, k, v, **options)

    watched, queried = {}, {}
    with families.quiet(), torch.no_grad():
        KVCache.detach(model)
        observe.forward(model, ids, None, lambda layer, k, v: watched.update({layer: (k, v)}), layers)
        with contextlib.nullcontext() if not built.dense else contextlib.suppress(CalibrationError):
            observe.forward_with_queries(model, ids, None, lambda layer, q, k: queried.update({layer: (q, k)}), layers)
        monkeypatch.setattr(PagedCache, "step", stepping)
        monkeypatch.setattr(PagedCache, "append", appending)
        cache = KVCache.for_model(model, "raw", dense=built.dense)
        decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        model(input_ids=ids, **decoded, **passed(model, cache), use_cache=True)
        KVCache.detach(model)
    assert watched.keys() == computed.keys() == layers
    for layer, (q, k, v) in computed.items():
        pairs = [*zip(watched[layer], (k, v), strict=True)]
        if layer in queried:
            pairs += [*zip(queried[layer], (q, k), strict=True)][built.dense :]
        for got, want in pairs:
            assert (got - want).norm() <= 1e-4 * want.norm()


def test_the_tables_are_what_the_code_says():
    text = families.DOCUMENT.read_text()
    assert families.table() in text
    assert families.census() in text
