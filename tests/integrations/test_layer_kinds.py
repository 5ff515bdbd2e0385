"""Caches of models whose layers are not all alike: recurrent layers beside attention, layers that share keys and values
or loop, chunks, an encoder. What `raw` does is what the stock cache does, in every way that a cache is used.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
import transformers
from integrations import families
from integrations.families import FAMILIES
from messages import mentions, raises
from nightly import at_night
from packaging.version import Version

from kvbits import PrefixStore
from kvbits.calibrate import calibrate
from kvbits.errors import CacheStateError, DataError, UnsupportedError
from kvbits.geometry import layer_places
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.masks import passed

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="families and their attention change with Transformers"
)

RECURRENT = ("Qwen3NextConfig", "FalconH1Config", "Lfm2Config", "NemotronHConfig")
DECODERS = (*RECURRENT, "Gemma3nTextConfig", "Llama4TextConfig", "DoryConfig")


def built(config):
    with families.quiet():
        return families.build(next(f for f in FAMILIES if f.config == config))


@pytest.fixture(scope="module", params=DECODERS)
def model(request):
    return built(request.param)


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request):
    return built(request.param)


def ids(batch=2, tokens=50, seed=1):
    return torch.randint(2, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded(x, left=20):
    mask = torch.ones_like(x)
    mask[1, :left] = 0
    return {"input_ids": x * mask, "attention_mask": mask}


def both(model, use):
    """Return what `use(model, cache)` returns with a raw KVCache and with the stock one."""
    with torch.no_grad(), families.quiet():
        got = use(model, KVCache.for_model(model, "raw"))
        KVCache.detach(model)
        stock = None if model.config.is_encoder_decoder else transformers.DynamicCache(config=model.config)
        return got, use(model, stock)


def generate(model, cache, **options):
    torch.manual_seed(3)
    return model.generate(
        **padded(ids()), past_key_values=cache, pad_token_id=0, **{"max_new_tokens": 24, "do_sample": False} | options
    )


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, *at_night({"do_sample": True}, {"num_return_sequences": 2, "do_sample": True})],
    ids=["beams", "sampling", "two each"],
)
def test_tokens_of_the_stock_cache_by_beams_and_sampling(model, options):
    got, want = both(model, lambda m, c: generate(m, c, **options))
    assert torch.equal(got, want)


def test_a_prompt_in_chunks_and_a_second_turn(model):
    def turns(m, cache):
        x, out = ids(2, 90), []
        for a, b in ((0, 7), (7, 37), (37, 38), (38, 39), (39, 90)):
            out.append(m(x[:, a:b], **passed(m, cache)).logits)
        return torch.cat(out, 1)

    got, want = both(model, turns)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * float(want.abs().max()))


def test_selected_repeated_copied_and_reset(model):
    def juggled(m, cache):
        if isinstance(cache, transformers.DynamicCache) and any(p.has_state for p in layer_places(m.config)):
            return by_hand(m)
        m(**padded(ids()), **passed(m, cache))
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        twin = copy.deepcopy(cache)
        mask = torch.cat([padded(ids())["attention_mask"][[1, 1, 0, 0]], torch.ones(4, 3, dtype=torch.long)], 1)
        out = [m(ids(4, 3, seed), attention_mask=mask, **passed(m, c)).logits for c, seed in ((cache, 5), (twin, 6))]
        cache.reset()
        return [*out, m(ids(3, 9), **passed(m, cache)).logits]

    def by_hand(m):
        """Stock recurrent layers neither select nor repeat: the same sequences from their beginning."""
        x, mask = padded(ids())["input_ids"][[1, 1, 0, 0]], padded(ids())["attention_mask"][[1, 1, 0, 0]]
        out = []
        for seed in (5, 6):
            cache = transformers.DynamicCache(config=m.config)
            m(x, attention_mask=mask, **passed(m, cache))
            longer = torch.cat([mask, torch.ones(4, 3, dtype=torch.long)], 1)
            out.append(m(ids(4, 3, seed), attention_mask=longer, **passed(m, cache)).logits)
        return [*out, m(ids(3, 9), past_key_values=transformers.DynamicCache(config=m.config)).logits]

    for got, want in zip(*both(model, juggled), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * float(want.abs().max()))


def test_eight_bits_are_near(model):
    with torch.no_grad(), families.quiet():
        found = []
        for cache in (KVCache.for_model(model, "int8"), transformers.DynamicCache(config=model.config)):
            found.append(
                torch.cat(
                    [
                        model(ids(1, 300)[:, a:b], **passed(model, cache)).logits
                        for a, b in ((0, 280), (280, 281), (281, 282), (282, 300))
                    ],
                    1,
                )
            )
    assert (found[0] - found[1]).norm() < 0.2 * found[1].norm()


# -- recurrent states -----------------------------------------------------------------------------------------------


def test_states_are_counted_and_cannot_be_stored_in_files(recurrent, tmp_path):
    cache = KVCache.for_model(recurrent, "int8")
    with torch.no_grad():
        recurrent(ids(), past_key_values=cache)
    places = layer_places(recurrent.config)
    assert [layer.__class__.__name__ for layer in cache.layers if hasattr(layer, "conv_states")] and len(
        cache.layers
    ) == len(places)
    held = [
        x
        for layer in cache.layers
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for x in states.values()
    ]
    assert cache.state_nbytes == sum(x.nbytes for x in held if x is not None) > 0
    assert cache.nbytes == cache.pages.nbytes + cache.state_nbytes
    with raises(UnsupportedError, "recurrent states", "index keys", "copy.deepcopy(cache)"):
        cache.save(tmp_path / "cache.kvbits")
    with raises(UnsupportedError, "KVCache.for_model", "copy.deepcopy"):
        KVCache.from_prefix(recurrent, ids(1), store=PrefixStore(tmp_path))


def test_a_state_cannot_go_back(recurrent):
    cache = KVCache.for_model(recurrent, "raw")
    with torch.no_grad():
        want = recurrent(ids(), past_key_values=cache).logits
        cache.crop(0)
        with raises(UnsupportedError, "crop(-3)", "recurrent state", "copy.deepcopy", "reset()"):
            cache.crop(-3)
        assert cache.get_seq_length() == 50 and cache.pages.seq_lens == [50, 50]
        cache.reset()
        assert torch.equal(recurrent(ids(), past_key_values=cache).logits, want)


def test_convolutions_alone_can_be_taken_back_while_they_are_recorded():
    model = built("Lfm2Config")

    def lookup(m, cache):
        return m.generate(
            ids(1).repeat(1, 2),
            past_key_values=cache,
            max_new_tokens=30,
            do_sample=False,
            prompt_lookup_num_tokens=4,
            pad_token_id=0,
        )

    got, want = both(model, lookup)
    assert torch.equal(got, want)


def test_a_pass_that_broke_off_is_not_gone_on_from(recurrent):
    cache = KVCache.for_model(recurrent, "raw")
    with torch.no_grad():
        recurrent(ids(), past_key_values=cache)
        twin = copy.deepcopy(cache)

        def fails(*args):
            raise RuntimeError("out of memory")

        hook = recurrent.base_model.layers[-1].register_forward_pre_hook(fails)
        with raises(RuntimeError, "out of memory"):
            recurrent(ids(2, 1), past_key_values=cache)
        hook.remove()
        for use in (
            lambda: recurrent(ids(2, 1), past_key_values=cache),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.crop(0),
        ):
            with raises(CacheStateError, "recurrent states", "reset()", "copy.deepcopy"):
                use()
        want = recurrent(ids(2, 1), past_key_values=twin).logits
        cache.reset()
        recurrent(ids(), past_key_values=cache)
        torch.testing.assert_close(recurrent(ids(2, 1), past_key_values=cache).logits, want)


@pytest.mark.parametrize("change", ["reset", "reorder_cache", "crop"])
def test_an_interrupt_between_pages_and_states_is_not_gone_on_from(monkeypatch, change):
    model = built("Lfm2Config")
    cache = KVCache.for_model(model, "raw")
    if change == "crop":
        cache.activate_past_recording()

    def stop(*args):
        raise KeyboardInterrupt

    with torch.no_grad():
        model(ids(), past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(
                *{
                    "reset": (cache._recurrent[0], "reset"),
                    "reorder_cache": (cache._recurrent[0], "select_states"),
                    "crop": (cache.pages, "crop"),
                }[change],
                stop,
            )
            getattr(cache, change)(*{"reset": (), "reorder_cache": (torch.tensor([1, 0]),), "crop": (-3,)}[change])
        with raises(CacheStateError, "recurrent states", "reset()", "copy.deepcopy"):
            model(ids(2, 1), past_key_values=cache)
        cache.reset()
        want = model(ids(2, 30, 9)).logits
        torch.testing.assert_close(model(ids(2, 30, 9), past_key_values=cache).logits, want)


# -- shared keys and values -----------------------------------------------------------------------------------------


def test_layers_that_share_have_no_bytes_of_their_own():
    model = built("Gemma3nTextConfig")
    cache = KVCache.for_model(model, "int8", max_tokens=256)
    places = layer_places(model.config)
    assert [p.stored for p in places] == [0, 0] and places[1].shares
    assert len(cache.pages.spec.layers) == 1 and cache.nbytes == cache.pages.spec.nbytes(256)
    assert mentions(cache.pages.cannot_decode_on_device(4, torch.float32), "share", "keys", "values")


# -- layers gone through more than once -----------------------------------------------------------------------------


def test_each_time_has_layers_of_its_own_behind_those_of_the_model():
    model = built("DoryConfig")
    assert [p.kind[:4] for p in layer_places(model.config)] == ["slid", "slid", "full", "full"] + 2 * ["slid", "full"]
    cache = KVCache.for_model(model, "int8")
    with torch.no_grad():
        with raises(UnsupportedError, "DoryModel", "'cache'", "'past_key_values'", "model(.., cache=cache)"):
            model(ids(), past_key_values=cache)
        model(ids(), cache=cache)
    assert len(cache.layers) == len(cache.pages.spec.layers) == 8 and cache.pages.seq_lens == [50, 50]
    assert len(calibrate(model, [ids(1, 600)], "klt4").static) == 8
    model.config.recurrent_kv_cache_mode = "last_loop"
    with raises(UnsupportedError, "DoryConfig", "stock cache"):
        KVCache.for_model(model, "int8")


# -- encoder and decoder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["BartConfig", "T5GemmaConfig", "WhisperConfig"])
def test_a_decoder_with_an_encoder(config, tmp_path):
    model = built(config)
    call = families.inputs(model)[0] | {"max_new_tokens": 20, "pad_token_id": 0}
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad(), families.quiet():
        got = []
        for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True}, {"do_sample": False}):
            torch.manual_seed(4)
            cache.reset()
            got.append(model.generate(**call, **options, past_key_values=cache))
        assert cache.nbytes > cache.self_attention_cache.nbytes > 0
        twin = copy.deepcopy(cache)
        assert twin.pages is not cache.pages and twin.get_seq_length() == cache.get_seq_length() > 10
        with raises(UnsupportedError, "encoder", "copy.deepcopy(cache)"):
            cache.save(tmp_path / "cache.kvbits")
        KVCache.detach(model)
        for tokens, options in zip(
            got, ({"num_beams": 3, "do_sample": False}, {"do_sample": True}, {"do_sample": False}), strict=True
        ):
            torch.manual_seed(4)
            assert torch.equal(tokens, model.generate(**call, **options))


def test_a_first_pass_that_failed_leaves_nothing_of_its_encoder():
    model = built("BartConfig")
    options = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": False}
    call, other = (
        families.inputs(model)[0],
        {
            "input_ids": ids(2, 25, 9),
            "attention_mask": torch.ones(2, 25, dtype=torch.long),
        },
    )
    cache = KVCache.for_model(model, "raw")
    with torch.no_grad(), families.quiet():
        hook = model.model.decoder.layers[1].self_attn.k_proj.register_forward_hook(
            lambda module, args, out: out * float("nan")
        )
        with raises(DataError, "nan"):
            model.generate(**call, **options, past_key_values=cache)
        hook.remove()
        got = model.generate(**other, **options, past_key_values=cache)
        KVCache.detach(model)
        assert torch.equal(got, model.generate(**other, **options))


# -- calibrated formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["Qwen3NextConfig", "FalconH1Config", "Gemma3nTextConfig", "Gemma4TextConfig"])
def test_layers_are_calibrated_where_they_are_stored(config):
    family = next(f for f in FAMILIES if f.config == config)
    wide = {"head_dim": 64} | ({"global_head_dim": 128} if "Gemma4" in config else {})
    with families.quiet(), torch.no_grad():
        model = families.build(dataclasses.replace(family, extra=family.extra | wide))
        calibration = calibrate(model, [ids(1, 600, seed) for seed in range(4)], "klt4")
        x, found = ids(1, 330, 9), []
        for cache in (
            KVCache.for_model(model, "klt4", calibration=calibration),
            transformers.DynamicCache(config=model.config),
        ):
            found.append(
                torch.cat(
                    [model(x[:, a:b], past_key_values=cache).logits for a, b in ((0, 300), (300, 301), (301, 330))], 1
                )
            )
    assert 0 < (found[0] - found[1]).norm() < 0.15 * found[1].norm()


def test_a_broken_pass_of_shared_layers_is_not_gone_on_from():
    """Keys of a single token are stored at the first of several visits: another token must not read them."""
    model, x = built("Gemma3nTextConfig"), ids(1, 60)
    with torch.no_grad(), families.quiet():
        cache, want = KVCache.for_model(model, "raw"), model(x[:, :51], use_cache=False).logits[:, 50]
        model(x[:, :50], past_key_values=cache)
        hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(x[:, 55:56], past_key_values=cache)
        hook.remove()
        with raises(CacheStateError, "layer 0", "abandon()", "reset()"):
            model(x[:, 50:51], past_key_values=cache)
        cache.abandon()
        torch.testing.assert_close(model(x[:, 50:51], past_key_values=cache).logits[:, 0], want)


# -- dense copies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["BloomConfig", "DeepseekV3Config"])
def test_dense_copies_are_of_the_same_pages(config):
    family = [f for f in FAMILIES if f.config == config][-1]
    with families.quiet(), torch.no_grad():
        model, x = families.build(family), ids(2, 300)
        with raises(UnsupportedError, type(model).__name__, "KVCache.for_model(model, .., dense=True)"):
            KVCache.for_model(model, "int8")
        cache, stock = KVCache.for_model(model, "int8", dense=True), transformers.DynamicCache(config=model.config)
        found = [
            torch.cat([model(x[:, a:b], past_key_values=c).logits for a, b in ((0, 280), (280, 281), (281, 300))], 1)
            for c in (cache, stock)
        ]
        assert 0 < (found[0] - found[1]).norm() < 0.15 * found[1].norm()
        assert cache.nbytes < sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
        cache.crop(-20)
        cache.reorder_cache(torch.tensor([1, 1]))
        again = model(x[[1, 1], 280:], past_key_values=cache).logits
        torch.testing.assert_close(again[0], found[0][1, 280:], rtol=0, atol=0.2 * float(found[0].abs().max()))
    assert model.config._attn_implementation == "eager"


def test_dense_copies_refuse_gradients_behind_a_history_and_unlike_lengths(tmp_path):
    model = built("BloomConfig")
    cache = KVCache.for_model(model, "raw", dense=True)
    model(ids(1, 30), past_key_values=cache)
    with raises(UnsupportedError, "gradients", "torch.no_grad()"):
        model(ids(1, 20), past_key_values=cache)
    llama = built("LlamaConfig")
    with torch.no_grad():
        ragged = KVCache.for_model(llama, "raw")
        llama(**padded(ids()), past_key_values=ragged)
        ragged.save(tmp_path / "x.kvbits")
        KVCache.detach(llama)
        with raises(UnsupportedError, "dense=True", 50, 30):
            llama(ids(2, 1), past_key_values=KVCache.load(tmp_path / "x.kvbits", llama, grow=True, dense=True))


@pytest.mark.parametrize(
    "config",
    [
        "MistralConfig",
        "Gemma3TextConfig",
        "Gemma3nTextConfig",
        "FalconH1Config",
        "InklingTextConfig",
        "DeepseekV32Config",
        *at_night("KimiLinearConfig"),
    ],
)
def test_dense_copies_are_what_each_pass_sees(config):
    """Windows in chunks longer and shorter than they are, shared layers, states beside keys, index keys: logits of the
    stock cache.
    """
    model, x = built(config), ids(2, 200)
    with torch.no_grad(), families.quiet():
        found = []
        for cache in (KVCache.for_model(model, "raw", dense=True), transformers.DynamicCache(config=model.config)):
            cuts = (0, 70, 71, 72, 90, 150, 151, 200)
            found.append(
                torch.cat([model(x[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)], 1)
            )
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4 * float(found[1].abs().max()))


def test_dense_copies_of_layers_in_chunks():
    model, x = built("Llama4TextConfig"), ids(2, 100)
    with torch.no_grad(), families.quiet():
        cache, cuts = KVCache.for_model(model, "raw", dense=True), (0, 20, 21, 60, 61, 100)
        got = torch.cat([model(x[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)], 1)
        want = model(x, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("config", ["DeepseekV32Config", "GlmMoeDsaConfig"])
def test_index_keys_go_where_the_tokens_go(config, tmp_path):
    model, x = built(config), ids(2, 120)

    def passes(cache, rows, *cuts):
        return torch.cat([model(x[rows][:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)], 1)

    with torch.no_grad(), families.quiet():
        ours, stock = KVCache.for_model(model, "raw", dense=True), transformers.DynamicCache(config=model.config)

        def same(rows, *cuts):
            got, want = (passes(cache, rows, *cuts) for cache in (ours, stock))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))

        same([0, 1], 0, 50, 51, 120)
        indexed = sum(p.is_indexed for p in layer_places(model.config))
        assert (
            ours.state_nbytes == indexed * 2 * 120 * model.config.index_head_dim * 4
            and ours.nbytes == ours.pages.nbytes + ours.state_nbytes
        )
        for cache in (ours, stock):
            cache.crop(-69)
            cache.reorder_cache(torch.tensor([1, 1]))
        same([1, 1], 51, 120)
        ours = copy.deepcopy(ours)
        for cache in (ours, stock):
            cache.crop(-20)
        last = len(model.model.layers) - 1
        # the last two: keys of all layers are stored
        for place in ("layers.1.input_layernorm", f"layers.{last}.self_attn.indexer", f"layers.{last}.mlp"):
            if f"model.{place}" not in dict(model.named_modules()):
                continue
            hook = model.get_submodule(f"model.{place}").register_forward_pre_hook(
                lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                passes(ours, [1, 1], 100, 120)
            hook.remove()
            ours.abandon()
            assert ours.get_seq_length() == 100, place
        same([1, 1], 100, 110, 120)
        for cache in (ours, stock):
            cache.batch_repeat_interleave(2)
        same([1, 1, 1, 1], 100, 119)
        ours.reset()
        stock = transformers.DynamicCache(config=model.config)
        same([0], 0, 60)
        with raises(UnsupportedError, "2 layers", "recurrent states", "index keys", "copy.deepcopy(cache)"):
            ours.save(tmp_path / "x.kvbits")
        ours.pages.save(tmp_path / "pages.kvbits")
        with raises(UnsupportedError, "2 layers", "recurrent states", "index keys", "KVCache.for_model(model)"):
            KVCache.load(tmp_path / "pages.kvbits", model, dense=True)
        with raises(
            UnsupportedError, "2 layers", "recurrent states", "index keys", "KVCache.for_model", "copy.deepcopy"
        ):
            KVCache.from_prefix(model, x[:1], store=PrefixStore(tmp_path), scheme="raw", dense=True)


def test_latents_are_saved_and_packed_in_every_format(tmp_path):
    model, x = built("DeepseekV3Config"), ids(2, 300)
    with torch.no_grad(), families.quiet():
        want = model(x, use_cache=False).logits[:, -10:]
        for scheme, limit in (
            ("raw", 1e-4),
            ("fp8", 0.1),
            ("int8", 0.05),
            ("int8_centered", 0.05),
            ("int4", 0.5),
            ("kivi4", 0.5),
        ):
            cache = KVCache.for_model(model, scheme, dense=True)
            model(x[:, :290], past_key_values=cache)
            cache.save(tmp_path / "latents.kvbits")
            cache = KVCache.load(tmp_path / "latents.kvbits", model, dense=True)
            error = (model(x[:, 290:], past_key_values=cache).logits - want).norm() / want.norm()
            assert error < limit, f"{scheme}: {error:.3f}"
