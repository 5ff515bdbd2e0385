"""Rotated keys and queries: scores stay, channels that stick out spread, means turn as the keys do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import SpecError
from kvbits.quant.basis import rotated_back, rotated_keys, rotated_queries, rotated_turn, rotations
from kvbits.quant.rotary import turn_by, turned_by
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, PerChannel, QuantSpec, Rotary, Scheme

FINE = QuantSpec(format="int8", granularity=schemes.PerGroup(32), symmetric=False, scale_dtype="float32")
ROTARY = Rotary(inv_freq=tuple(100.0 ** -(i / 32) for i in range(32)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotations_are_exact_and_undo_each_other(head_dim, dtype):
    keys, queries = rotations(head_dim, dtype, torch.device("cpu"))
    assert torch.equal(keys.double() @ queries.double().T, torch.eye(head_dim).double())
    assert keys.abs().unique().numel() == queries.abs().unique().numel() == 1


def test_scores_stay_and_one_channel_becomes_all():
    q, k = torch.randn(5, 64, dtype=torch.float64), torch.randn(7, 64, dtype=torch.float64)
    torch.testing.assert_close(rotated_queries(q) @ rotated_keys(k).T, q @ k.T)
    torch.testing.assert_close(rotated_back(rotated_keys(k)), k)
    one = torch.zeros(64, dtype=torch.float64)
    one[3] = 100.0
    assert rotated_keys(one).abs().max() == rotated_keys(one).abs().min() == 100 / 8


def test_means_of_rotated_keys_turn_as_the_keys_do():
    turn = turn_by(ROTARY, 64, 64)
    x = torch.randn(7, 64)
    torch.testing.assert_close(turned_by(rotated_keys(x), rotated_turn(turn)), rotated_keys(turned_by(x, turn)), atol=1e-5, rtol=1e-5)


def attend(q, k, v):
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) / 8
    late = torch.arange(k.shape[1])[None] > torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(late, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("changes", [{"num_sink_tokens": 4, "residual_length": 32}, {"token_local": True}, {"center": True}], ids=str)
def test_a_cache_of_rotated_keys_attends_like_the_model_and_gives_its_keys_back(changes):
    """Chunks, single tokens, sinks, tail, closed and packed pages."""
    key = dataclasses.replace(FINE, basis="hadamard", center="channel" if changes.get("center") or changes.get("token_local") else None)
    more = {n: x for n, x in changes.items() if n != "center"}
    scheme = Scheme(name="rotated", key=key, value=FINE, **more)
    cache = PagedCache(CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=2, head_dim=64, rotary=ROTARY),), raw_dtype="float32"))
    torch.manual_seed(0)
    n = 215
    q, k, v = torch.randn(2, n, 4, 64), torch.randn(2, n, 2, 64) + 5 * torch.eye(64)[9], torch.randn(2, n, 2, 64)
    at = 0
    for size in (150, 40, *[1] * 25):
        out = cache.step(0, q[:, at : at + size], k[:, at : at + size], v[:, at : at + size], scaling=1 / 8)
        at += size
        torch.testing.assert_close(out.double(), attend(q[:, at - size : at], k[:, :at], v[:, :at]), atol=0.03, rtol=0)
    keys, values = cache.dequantize(0, 1)
    torch.testing.assert_close(keys, k[1], atol=0.05, rtol=0)
    torch.testing.assert_close(values, v[1], atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dataclasses.replace(FINE, basis="hadamard", static=True), "static scales"),
        (lambda: QuantSpec(format="nuq4", granularity=PerChannel(), symmetric=False, basis="hadamard"), "codebooks"),
        (lambda: dataclasses.replace(FINE, basis="hadamard", pre_rope=True), "pre_rope"),
        (lambda: Scheme(name="x", key=FINE, value=dataclasses.replace(FINE, basis="hadamard")), "of banded codes"),
        (
            lambda: PageLayout(key=dataclasses.replace(FINE, basis="hadamard"), value=FINE, page_size=64, num_kv_heads=1, head_dim=96),
            "a power of two, and head_dim=96 is none",
        ),
    ],
)
def test_what_cannot_be_rotated_is_refused(make, says):
    with pytest.raises(SpecError, match=says):
        make()


def test_rotation_keeps_four_bit_keys_with_an_outlying_channel():
    """What it is for: a channel ten times the others costs a group of 64 its range, a rotated one a fraction of it."""
    torch.manual_seed(0)
    k, q, v = torch.randn(1, 256, 2, 64), torch.randn(1, 1, 4, 64), torch.randn(1, 256, 2, 64)
    k[..., 5] *= 10
    wrong = {}
    for rotated in (False, True):
        key = dataclasses.replace(schemes.get("int4_rotated").key, basis="hadamard" if rotated else None)
        scheme = Scheme(name="x", key=key, value=QuantSpec.raw())
        cache = PagedCache(CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=2, head_dim=64),), raw_dtype="float32"))
        cache.append(0, k[:, :-1], v[:, :-1])
        out = cache.step(0, q, k[:, -1:], v[:, -1:], scaling=1 / 8)
        wrong[rotated] = (out.double() - attend(q, k, v)).abs().mean().item()
    assert wrong[True] < 0.6 * wrong[False]
