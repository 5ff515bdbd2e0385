"""Recipes of other engines against the same arithmetic written anew in float64, number by number, from what the engines
are documented to compute.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from messages import raises
from nightly import at_night
from peers import CACHES, OSCAR_KEPT, PEERS, TILE, fp8, kvarn, lloyd_max, make, nvfp4, oscar, oscar_rotation, tiles

from kvbits.errors import UnsupportedError
from kvbits.evaluate.caches import base_factory, factory, read_caches
from kvbits.evaluate.fidelity import compare
from kvbits.evaluate.rows import Rows
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.texts import Text, novel
from kvbits.quant.basis import hadamard
from kvbits.spec import LayerGeometry

FILE = Path(__file__).parents[2] / "benchmarks" / "peers.py"
IDS = torch.tensor(tiny.tokenizer()(novel()[:700])["input_ids"])


def numbers(head_dim=128, rows=200, seed=5):
    """Tokens of unlike sizes, some with an outlier, one of zeros, one constant."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, head_dim, generator=drawn) * torch.rand(rows, 1, generator=drawn).mul(6).exp2()
    x[::7, 5] += 40
    x[3], x[4] = 0, 1.5
    return x


def walsh(n):
    """The Hadamard matrix by its definition: entry (i, j) is -1 to the number of bits that i and j share."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / math.sqrt(n)


def close(found, wanted, x, *, flips=0.002):
    """Equal to float32's rounding, but for numbers so near the middle of two codes that another order of additions
    decides (a share of `flips` at most).
    """
    same = np.isclose(found.double().numpy(), wanted, rtol=1e-4, atol=1e-5 * float(x.abs().max()))
    assert same.all(-1).mean() >= 1 - 128 * flips and same.mean() >= 1 - flips, (
        f"{(~same).mean():.2%} of the numbers differ"
    )


def half(x):
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float64)


@pytest.mark.night
@pytest.mark.parametrize("bits", [4, 3])
def test_turboquant_s_keys_are_levels_of_the_normal_distribution_as_long_as_the_key(bits):
    x, peer = numbers(), PEERS[f"turboquant_{bits}bit_nc"]
    # levels of least error, from a million normal quantiles: each the mean of those nearest to it
    grid = np.array(
        [math.sqrt(2) * v for v in torch.erfinv(2 * (torch.arange(400_000).double() + 0.5) / 400_000 - 1).tolist()]
    )
    levels = np.linspace(-2.5, 2.5, 2**bits)
    for _ in range(400):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
        levels = np.array([grid[nearest == i].mean() for i in range(2**bits)])
    assert np.allclose(lloyd_max(bits).double().numpy(), levels, atol=2e-3)
    levels, k = lloyd_max(bits).double().numpy(), x.double().numpy()
    norm = np.linalg.norm(k, axis=-1, keepdims=True)
    turned = k / (norm + 1e-8) @ walsh(128) * math.sqrt(128)
    chosen = levels[np.abs(turned[..., None] - levels).argmin(-1)]
    wanted = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True) @ walsh(128) * half(norm)
    found = peer.keys(x)
    rows = np.isclose(found.double().numpy(), wanted, rtol=1e-3, atol=1e-4 * norm).all(-1)
    assert rows[5:].mean() > 0.97, "a code that flips at a boundary moves its whole token"
    assert np.allclose(found.norm(dim=-1), half(norm)[:, 0], rtol=1e-5), "the length is the stored norm's"


@pytest.mark.parametrize("bits", [4, 3])
def test_turboquant_s_values_are_integers_between_a_token_s_ends(bits):
    x, steps = numbers(), 2**bits - 1
    v = x.double().numpy()
    low, high = v.min(-1, keepdims=True), v.max(-1, keepdims=True)
    scale = np.maximum((high - low) / steps, 1e-8)
    wanted = np.clip(np.floor((v - low) / scale + 0.5), 0, steps) * half(scale) + half(low)
    close(PEERS[f"turboquant_{bits}bit_nc"].values(x), wanted, x)


def test_int4_per_token_head_turns_and_has_a_whole_zero_point():
    x, peer = numbers(), PEERS["int4_per_token_head"]
    assert torch.equal(peer.keys(x), peer.values(x))
    signs = (torch.randint(2, (128,), generator=torch.Generator().manual_seed(128)) * 2 - 1).double().numpy()
    turned = (x.double().numpy() * signs) @ walsh(128)
    low, high = turned.min(-1, keepdims=True), turned.max(-1, keepdims=True)
    scale = np.maximum((high - low) / 15, 1e-6)
    zero = np.clip(np.sign(-low) * np.floor(np.abs(low / scale) + 0.5), 0, 15)
    codes = turned / scale + zero
    codes = np.clip(np.sign(codes) * np.floor(np.abs(codes) + 0.5), 0, 15)
    kept = np.frombuffer(
        (np.frombuffer(scale.astype(np.float32).tobytes(), np.int32) // 16 * 16).astype(np.int32).tobytes(), np.float32
    ).reshape(-1, 1)
    close(peer.keys(x), ((codes - zero) * kept.astype(np.float64)) @ walsh(128) * signs, x, flips=0.01)
    wide = numbers(head_dim=96)
    assert (peer.keys(wide) - wide).norm() < 0.1 * wide.norm(), "three Hadamard matrices of 32"


def test_q4_0_turns_whole_keys_and_64_channels_of_values():
    x, peer = numbers(), PEERS["q4_0_rotated"]

    def stored(turned):
        found = np.empty_like(turned)
        for at in range(0, turned.shape[-1], 32):
            part = turned[:, at : at + 32]
            far = part[np.arange(len(part)), np.abs(part).argmax(-1)][:, None]
            scale = far / -8
            codes = (
                np.minimum(15, np.trunc(np.divide(part, scale, out=np.zeros_like(part), where=scale != 0) + 8.5)) - 8
            )
            found[:, at : at + 32] = codes * half(scale)
        return found

    k = x.double().numpy()
    close(peer.keys(x), stored(k @ walsh(128)) @ walsh(128), x, flips=0.01)
    halves = np.concatenate([stored(k[:, at : at + 64] @ walsh(64)) @ walsh(64) for at in (0, 64)], -1)
    close(peer.values(x), halves, x, flips=0.01)
    assert not torch.allclose(peer.keys(x), peer.values(x))


def test_q8_0_has_127_levels_of_either_sign_in_blocks_of_32():
    x, peer = numbers(), PEERS["q8_0_rotated"]

    def stored(turned):
        found = np.empty_like(turned)
        for at in range(0, turned.shape[-1], 32):
            part = turned[:, at : at + 32]
            scale = np.abs(part).max(-1, keepdims=True) / 127
            codes = np.divide(part, scale, out=np.zeros_like(part), where=scale != 0)
            found[:, at : at + 32] = np.sign(codes) * np.floor(np.abs(codes) + 0.5) * half(scale)
        return found

    close(peer.keys(x), stored(x.double().numpy() @ walsh(128)) @ walsh(128), x, flips=0.01)
    assert peer.key_bits(128) == 8.5 and not torch.allclose(peer.keys(x), peer.values(x))


def balanced(tile, iterations=16):
    """KVarN's factors of one tile [rows, columns], number by number as its paper and its store kernel have them."""
    log_rows, log_columns = np.zeros((len(tile), 1)), np.zeros((1, tile.shape[1]))

    def divided():
        return tile / np.exp(log_columns) / np.exp(log_rows)

    def uneven(x):
        return sum(x.std(axis, ddof=1).max() / max(x.std(axis, ddof=1).min(), 1e-8) for axis in (0, 1))

    best, least = (log_rows, log_columns), uneven(tile)
    for _ in range(iterations):
        spread = divided().std(0, ddof=1, keepdims=True)
        log_columns = np.clip(log_columns + np.log(np.clip(spread, 1e-3, 1e3)), -0.3, 10)
        spread = divided().std(1, ddof=1, keepdims=True)
        log_rows = np.clip(log_rows + np.log(np.clip(spread, 1e-3, 1e3)), -0.3, 10)
        if (now := uneven(divided())) <= least:
            best, least = (log_rows, log_columns), now
    return np.exp(best[0]), np.exp(best[1])


@pytest.mark.parametrize("bits", [4, 2])
def test_kvarn_s_tiles_are_even_in_rows_and_columns(bits):
    drawn = torch.Generator().manual_seed(2)
    x = torch.randn(3, 64, TILE, generator=drawn) * torch.rand(3, 64, 1, generator=drawn).mul(5).exp2()
    x *= torch.rand(3, 1, TILE, generator=drawn).mul(3).exp2()
    for one in x:
        tile = one.double().numpy()
        rows, columns = balanced(tile)
        even = tile / rows / columns
        low, high = even.min(1, keepdims=True), even.max(1, keepdims=True)
        scale = (high - low) / (2**bits - 1)
        codes = np.clip(np.round((even - low) / scale), 0, 2**bits - 1)
        wanted = (codes * half(rows * scale) + half(rows * low)) * half(columns)
        close(tiles(one, bits), wanted, one, flips=0.01)
        plain_low, plain_high = tile.min(1, keepdims=True), tile.max(1, keepdims=True)
        plain = (plain_high - plain_low) / (2**bits - 1)
        without = np.round((tile - plain_low) / plain) * plain + plain_low
        assert np.square(wanted - tile).sum() < np.square(without - tile).sum()


def test_kvarn_s_keys_have_rows_of_channels_and_its_values_of_tokens():
    x = numbers(rows=2 * TILE)[None]
    x[:, 3:5] = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(1))
    keys, values = kvarn(x, x)
    for at in (slice(0, TILE), slice(TILE, 2 * TILE)):
        tile = hadamard(x[0, at])
        by_channel, by_token = tiles(tile.T.contiguous(), 4).T, tiles(tile, 2)
        for found, wanted in ((keys, by_channel), (values, by_token)):
            missed = (hadamard(found[0, at]) - wanted).norm() / wanted.norm()
            assert missed < 2e-3, "half a step of float16's factors"
        assert (tiles(tile, 4) - by_channel).norm() > 0.02 * by_channel.norm()


def test_oscar_turns_by_moments_clips_and_has_four_levels():
    drawn = torch.Generator().manual_seed(4)
    of = torch.randn(256, 256, generator=drawn, dtype=torch.float64) * torch.arange(1.0, 257).double()
    moments = of.T @ of
    rotation = oscar_rotation(moments)
    assert torch.allclose(rotation @ rotation.T, torch.eye(256, dtype=torch.float64), atol=1e-9)
    values, vectors = (t.numpy() for t in torch.linalg.eigh(moments))
    order, mixed = np.argsort(-values), vectors @ walsh(256)
    wanted = np.stack([mixed[:, order[int(f"{i:08b}"[::-1], 2)]] for i in range(256)], 1)
    assert np.allclose(rotation.numpy(), wanted, atol=1e-9)
    x = numbers(head_dim=256)
    y = x.double().numpy() @ rotation.numpy()
    limit = np.sort(np.abs(y), -1)[:, int(OSCAR_KEPT[1] * 256), None]
    found = []
    for part in (np.clip(y, -limit, limit)[:, :128], np.clip(y, -limit, limit)[:, 128:]):
        low, high = part.min(-1, keepdims=True), part.max(-1, keepdims=True)
        scale = np.maximum(high - low, 1e-8) / 3
        codes = np.clip(np.floor(part / scale - low / scale + 0.5), 0, 3)
        found.append((codes - half(-low / scale)) * half(scale))
    close(oscar(x, rotation.float(), OSCAR_KEPT[1]), np.concatenate(found, -1) @ rotation.numpy().T, x, flips=0.01)


def test_fp8_has_no_scale():
    bytes_of = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = bytes_of[bytes_of.isfinite()]
    x = numbers() * 2
    wanted = exact.double().numpy()[
        np.abs(np.clip(x.double().numpy(), -448, 448)[..., None] - exact.double().numpy()).argmin(-1)
    ]
    close(fp8(x), wanted, x)
    assert fp8(torch.tensor([1000.0, -1e9, 448.0])).tolist() == [448.0, -448.0, 448.0]


BITS = {
    "turboquant_4bit_nc": 4 + 24 / 64,
    "turboquant_3bit_nc": 3 + 24 / 64,
    "int4_per_token_head": 4.5,
    "fp8_unscaled": 8.0,
    "q4_0_rotated": 4.5,
    "q8_0_rotated": 8.5,
}


def test_bits_count_scales_norms_and_layers_that_stay_raw():
    assert BITS.keys() == PEERS.keys() and CACHES.keys() == {"nvfp4", *PEERS}
    for name, bits in BITS.items():
        caches, info = make(name, tuple([LayerGeometry(num_kv_heads=2, head_dim=64)] * 30))
        raw = sum(type(layer).__name__ == "DynamicLayer" for layer in caches().layers)
        assert raw == (4 if "turboquant" in name else 0) and info["bits_per_element"] == pytest.approx(
            (bits * (30 - raw) + 16 * raw) / 30
        )
    with raises(UnsupportedError, "q4_0_rotated", "head_dim", 64, 96):
        make("q4_0_rotated", (LayerGeometry(num_kv_heads=2, head_dim=96),))
    with raises(UnsupportedError, "turboquant_4bit_nc", "head_dim", "power of two", 96):
        make("turboquant_4bit_nc", (LayerGeometry(num_kv_heads=2, head_dim=96),))


@pytest.mark.parametrize("name", ["q4_0_rotated", *at_night(*(name for name in PEERS if name != "q4_0_rotated"))])
def test_a_pass_of_many_tokens_reads_what_single_ones_read(name, monkeypatch):
    model = tiny.model()
    monkeypatch.setitem(PEERS, name, dataclasses.replace(PEERS[name], raw_layers=0))
    made = factory(model, name, caches=CACHES)
    assert made.kind == "simulated" and not made.stores_padding
    single, chunks = (
        compare(model, {"base": base_factory(model).make(1, 200), name: made.make(1, 200)}, IDS[:200], chunk=n)[name]
        for n in (1, 50)
    )
    assert single.kl_mean > 1e-7 and single.kl_mean == pytest.approx(chunks.kl_mean, rel=2e-2)
    alone = Rows(model, made.make(1, 100), [IDS[:60]], 16).logits
    beside = Rows(model, made.make(2, 200), [IDS[:60], IDS[100:197]], 16).logits
    assert torch.allclose(alone[0], beside[0], atol=1e-3), "padding changes nothing"


KLS = {
    "nvfp4": 0.0083472,
    "turboquant_4bit_nc": 0.0,
    "turboquant_3bit_nc": 0.0,
    "int4_per_token_head": 0.127351,
    "fp8_unscaled": 0.0140715,
    "q4_0_rotated": 0.1196907,
    "q8_0_rotated": 0.0005963,
}
"""Mean KL on the tiny model when the recipes were part of the package, but of q8_0_rotated, which was added later. The
model's two layers stay raw in TurboQuant.
"""


def test_the_file_is_read_as_caches_and_gives_the_figures_of_before(tmp_path):
    caches = read_caches(FILE)
    found = Evaluation(
        name="tiny",
        schemes=["caches"],
        caches=caches,
        tasks=["fidelity"],
        texts=(Text("one", novel()[:4000]),),
        out=tmp_path,
        options=Options(windows=2, length=200, chunk=32),
    ).run(tiny.model(key_bias=4.0), tiny.tokenizer(), progress=False)["fidelity"]
    assert list(found) == ["32-bit", *caches]
    assert {name: found[name]["kl_mean"] for name in KLS} == pytest.approx(KLS, rel=1e-2, abs=1e-9)


def test_nvfp4_is_the_published_arithmetic():
    """Two tokens in groups of 16 by hand: the page's largest number gets the largest scale, 448; other groups the
    nearest E4M3 number, half to even.
    """
    x = torch.zeros(2, 32)
    x[0, :9] = torch.tensor(
        [-2688.0, 448 * 0.25, 448 * 0.75, 448 * 1.25, 448 * 2.5, 448 * 3.5, 448 * 5.0, 448 * -1.75, 448 * 0.26]
    )
    x[0, 20], x[0, 21], x[1, 7] = 26.88, 13.0, 13440 * 2.0**-9
    found = nvfp4(x)
    assert found[0, :9].tolist() == [
        -2688.0,
        0,
        448 * 1.0,
        448 * 1.0,
        448 * 2.0,
        448 * 4.0,
        448 * 4.0,
        448 * -2.0,
        448 * 0.5,
    ]
    assert found[0, 20:22].tolist() == [27.0, 13.5], "a scale of 4.48 is stored as 4.5; 13 / 4.5 is nearest to 3"
    assert found[1, 7] == 27.0, "4.375 lies halfway between 4.25 and 4.5, which is even"
    assert not found[1, 16:].any() and not nvfp4(torch.zeros(64, 64)).any()
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = (nvfp4(torch.randn(3, 64, 128)).abs().unflatten(-1, (-1, 16)) / 6).flatten(0, -2)
    for group in levels[:100]:
        # a group's largest number is 6 of its scales, or 4 where its scale was rounded up
        steps = group / group.max() * 6
        assert min((steps * k - e2m1[:, None]).abs().amin(0).max().item() for k in (1, 4 / 6)) < 1e-5


def test_nvfp4_in_a_dense_cache_replaces_whole_pages():
    model = tiny.model(key_bias=4.0)
    made = factory(model, "nvfp4", caches=CACHES)
    assert made.kind == "simulated" and made.scheme is None
    head_dim = made.make(1, 700).layers[0].group.layouts["closed"].head_dim
    assert made.info["bits_per_element"] == 4.5 + 32 / (64 * head_dim)
    found = compare(model, {"16-bit": factory(model, "raw").make(1, 700), "nvfp4": made.make(1, 700)}, IDS, chunk=100)
    assert 0 < found["nvfp4"].kl_mean < 0.5
