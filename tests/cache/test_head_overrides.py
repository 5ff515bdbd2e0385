"""Heads of one layer may be stored in different ways; attention and contents are as if each head had a cache of its own."""

import dataclasses

import pytest
import torch

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.spec import CacheSpec, LayerGeometry, Override, PerChannel, PerGroup, PerToken, QuantSpec, Scheme

LAYERS = (LayerGeometry(num_kv_heads=3, head_dim=64),) * 2
RAW = QuantSpec.raw()


def spec(*overrides: Override) -> CacheSpec:
    return CacheSpec(scheme=dataclasses.replace(schemes.get("int4"), overrides=overrides), layers=LAYERS, raw_dtype="float32")


def feed(cache: PagedCache, heads: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Outputs of chunks and tokens whose keys and values are those of `heads` out of three; two query heads per kv head."""
    g = torch.Generator().manual_seed(seed)
    outs = []
    for t in (200, 1, 1, 30, 1):
        for layer in range(2):
            q, k, v = (torch.randn(2, t, n, 64, generator=g) for n in (6, 3, 3))
            q_heads = [2 * h + j for h in heads for j in range(2)]
            outs.append(cache.step(layer, q[:, :, q_heads], k[:, :, heads], v[:, :, heads], scaling=0.125))
    return outs


def test_a_raw_head_is_exact_and_the_others_are_as_before():
    mixed = PagedCache(spec(Override(layers=(0,), heads=(1,), key=RAW, value=RAW)))
    plain, raw = PagedCache(spec()), PagedCache(spec(Override(layers=(0, 1), key=RAW, value=RAW)))
    got, want, exact = feed(mixed, [0, 1, 2]), feed(plain, [0, 1, 2]), feed(raw, [0, 1, 2])
    for i in range(0, len(got), 2):  # layer 0
        torch.testing.assert_close(got[i][:, :, 2:4], exact[i][:, :, 2:4], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[i][:, :, [0, 1, 4, 5]], want[i][:, :, [0, 1, 4, 5]], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[i + 1], want[i + 1], atol=1e-5, rtol=1e-5)
    k, _ = mixed.dequantize(0, 1)
    assert torch.equal(k[:, 1], raw.dequantize(0, 1)[0][:, 1])
    assert torch.equal(k[:, [0, 2]], plain.dequantize(0, 1)[0][:, [0, 2]])


NUQ = {
    "key": QuantSpec(format="nuq4", granularity=PerChannel(), symmetric=False), "value": QuantSpec(format="nuq3", granularity=PerToken(), symmetric=False)
}  # fmt: skip
CALIBRATED = {"codebooks": NUQ, "scales": dict.fromkeys(("key", "value"), QuantSpec(format="int4", granularity=PerChannel(), static=True))}


def calibration(key: QuantSpec, value: QuantSpec) -> list[dict[str, torch.Tensor]]:
    """Another one for every head."""
    found = []
    for _ in LAYERS:
        layer = {}
        for side, s in (("k", key), ("v", value)):
            if s.static:
                layer[f"{side}_scale"] = torch.rand(3, 64) * 0.2 + 0.3
            else:
                layer[f"{side}_codebook"] = torch.rand(3, 2**s.bits).mul(2).sub(1).sort(-1).values
        found.append(layer)
    return found


@pytest.mark.parametrize("kind", CALIBRATED)
@pytest.mark.parametrize("side", ["both", "keys"])
def test_heads_of_a_calibrated_layer_may_have_codes_without_calibration(kind, side, tmp_path):
    int8 = QuantSpec(format="int8", granularity=PerGroup(32))
    specs = CALIBRATED[kind]
    base = Scheme(name="calibrated", residual_length=0, **specs)
    override = Override(layers=(0,), heads=(1,), key=int8, value=int8 if side == "both" else specs["value"])
    static = calibration(**specs)
    mixed, plain, other = (
        PagedCache(CacheSpec(scheme=dataclasses.replace(base, overrides=o), layers=LAYERS, raw_dtype="float32"), static=static)
        for o in ((override,), (), (dataclasses.replace(override, heads=None),))
    )
    got, want, eight = feed(mixed, [0, 1, 2]), feed(plain, [0, 1, 2]), feed(other, [0, 1, 2])
    for i in range(0, len(got), 2):  # layer 0
        torch.testing.assert_close(got[i][:, :, 2:4], eight[i][:, :, 2:4], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[i][:, :, [0, 1, 4, 5]], want[i][:, :, [0, 1, 4, 5]], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[i + 1], want[i + 1], atol=1e-5, rtol=1e-5)
    assert not torch.equal(got[-2][:, :, 2:4], want[-2][:, :, 2:4])
    for x, y, z in zip(mixed.dequantize(0, 1), other.dequantize(0, 1), plain.dequantize(0, 1), strict=True):
        assert torch.equal(x[:, 1], y[:, 1]) and torch.equal(x[:, [0, 2]], z[:, [0, 2]])
    mixed.save(tmp_path / "cache.safetensors")
    again = PagedCache.load(tmp_path / "cache.safetensors")
    for x, y in zip(mixed.dequantize(0, 1), again.dequantize(0, 1), strict=True):
        assert torch.equal(x, y)


def test_heads_with_another_calibration_than_their_layer_s_are_refused():
    nuq3 = dataclasses.replace(NUQ["key"], format="nuq3")
    for base, key in ((NUQ, nuq3), (dict.fromkeys(("key", "value"), QuantSpec()), nuq3), (NUQ, CALIBRATED["scales"]["key"])):
        scheme = Scheme(name="x", overrides=(Override(layers=(1,), heads=(0, 2), key=key, value=base["value"]),), **base)
        with pytest.raises(SpecError, match=r"kv heads \[0, 2\] of layer 1 have keys in .*, which needs a calibration, but calibrations are by layer, here for .*"
                                            "give that spec to the whole layer, or those heads one without calibration"):  # fmt: skip
            CacheSpec(scheme=scheme, layers=LAYERS)


def test_bytes_are_planned_and_survive_crop_fork_and_saving(tmp_path):
    s = spec(Override(layers=(-1,), heads=(0, 2), key=RAW, value=RAW))
    cache = PagedCache(s, batch_size=2, max_tokens=240)
    feed(cache, [0, 1, 2])
    assert cache.nbytes == s.nbytes(240, 2) == sum(cache.bytes_by_kind().values())
    before = cache.dequantize(1, 0)
    cache.save(tmp_path / "cache.safetensors")
    again = PagedCache.load(tmp_path / "cache.safetensors")
    for x, y in zip(before, again.dequantize(1, 0), strict=True):
        assert torch.equal(x, y)
    cache.select([1, 0])
    for x, y in zip(before, cache.dequantize(1, 1), strict=True):
        assert torch.equal(x, y)
    cache.crop(100)
    assert all(len(x) == 100 for x in cache.dequantize(1, 0))


def test_overrides_round_trip_and_refuse_heads_that_do_not_exist():
    s = spec(Override(layers=[0], heads=[2], key=RAW, value=RAW))
    assert Scheme.from_json(s.scheme.to_json()) == s.scheme
    assert [g.heads for g in s.groups] == [((0, 1),), ((2,),), ((0, 1, 2),)]
    with pytest.raises(SpecError, match="kv head 3 of layer 1, which has 3 kv heads"):
        spec(Override(layers=(1,), heads=(3,), key=RAW, value=RAW))


@pytest.mark.parametrize("window", [1, 2, 33, 100])
@pytest.mark.parametrize("steps", [(1,), (200,), (150, 1, 1, 30, 1), (64, 63, 1, 1)])
def test_dequantize_gives_what_all_heads_hold_of_a_sliding_window(window, steps):
    """Pages leave a window whole: the raw head's and the others' at other times."""
    layers = (LayerGeometry(num_kv_heads=3, head_dim=64, sliding_window=window),)
    scheme = dataclasses.replace(schemes.get("int8"), overrides=(Override(layers=(0,), heads=(1,), key=RAW, value=RAW),))
    cache = PagedCache(CacheSpec(scheme=scheme, layers=layers, raw_dtype="float32"))
    g = torch.Generator().manual_seed(1)
    fed = []
    for t in steps:
        q, k, v = (torch.randn(2, t, 3, 64, generator=g) for _ in "qkv")
        cache.step(0, q, k, v, scaling=0.125)
        fed.append((k, v))
        for row in range(2):
            for side, found in enumerate(cache.dequantize(0, row)):
                whole = torch.cat([x[side][row] for x in fed])
                assert len(found) >= min(window - 1, len(whole))
                want = whole[len(whole) - len(found) :]
                assert torch.equal(found[:, 1], want[:, 1])
                torch.testing.assert_close(found, want, atol=0.03, rtol=0.01)
