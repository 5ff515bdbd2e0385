"""Transformers on a GPU: the packed cache through the GPU kernels against the reference on the same pages."""

import pytest
import torch
from messages import raises
from ops.cpu_cases import static_params
from transformers import AutoModelForCausalLM, LlamaConfig

from kvbits import later, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.calibrate.calibration import Calibration, fingerprint
from kvbits.errors import DataError
from kvbits.integrations.huggingface import KVCache
from kvbits.spec import CacheSpec, LayerGeometry, Override, Tier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=211,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()


def feed(model, cache, ids, mask, parts=((0, 300), (300, 340), *((340 + i, 341 + i) for i in range(6)))):
    """Logits of the last positions: a ragged prompt, a chunk, then single tokens."""
    out = []
    with torch.no_grad():
        for start, end in parts:
            out.append(
                model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits[:, -1].float()
            )
    return torch.stack(out)


@pytest.mark.parametrize(
    "scheme", ["raw", "int8", "int8_centered", "int8_per_channel", "int4", "int4_centered", "kivi4", "kivi2", "fp8"]
)
def test_gpu_kernels_and_the_reference_give_the_same_logits(model, scheme):
    ids = torch.randint(2, 211, (3, 400), generator=torch.Generator().manual_seed(1)).to("cuda")
    mask = torch.ones(3, 400, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    mask[2, :290] = 0
    fast, slow = KVCache.for_model(model, scheme), KVCache.for_model(model, scheme, backend="reference")
    got, want = feed(model, fast, ids, mask), feed(model, slow, ids, mask)
    error = ((got - want).norm() / want.norm()).item()
    served = [op for op in fast.explain()["ops"] if op.startswith("attend by")]
    print(f"{scheme}: relative difference {error:.4f}; {served}")
    assert error < 0.05
    assert all("by reference" not in op for op in served), served


def test_tiers_run_through_gpu_kernels_alone(model):
    """Preset `tiered` with tiers that fit 900 tokens: raw, 8-bit and 4-bit pages in every step, long chunks over
    history, demotions while decoding.
    """
    scheme = schemes.get("tiered", residual_length=64, tiers=(Tier(num_tokens=192),))
    ids = torch.randint(2, 211, (3, 800), generator=torch.Generator().manual_seed(3)).to("cuda")
    mask = torch.ones(3, 800, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    mask[2, :290] = 0
    fast, slow = KVCache.for_model(model, scheme), KVCache.for_model(model, scheme, backend="reference")
    parts = [(0, 300), (300, 340), (340, 540), *((540 + i, 541 + i) for i in range(80))]
    got, want = (feed(model, cache, ids, mask, parts=parts) for cache in (fast, slow))
    error = ((got - want).norm() / want.norm()).item()
    ops = fast.explain()["ops"]
    print(f"relative difference {error:.4f}; {ops}")
    assert error < 0.05
    assert all(" by cuda" in op for op in ops) and len(ops) > 3
    (layers,) = fast.explain()["layers"]
    used = {name: pages["used"] for name, pages in layers["pages"].items()}
    assert all(used.values()) and "tier0" in used, "all tiers are there"


def test_banded_pages_run_on_the_gpu(model):
    """klt2: a ragged prompt, a chunk, single tokens."""
    scheme = schemes.get("klt2", residual_length=64)
    ids = torch.randint(2, 211, (3, 800), generator=torch.Generator().manual_seed(3)).to("cuda")
    mask = torch.ones(3, 800, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    calibration = Calibration(
        [
            {n: x for n, x in static_params(scheme.key, scheme.value, 2, 64).items() if n in ("k_basis", "k_mean")}
            for _ in range(3)
        ],
        fingerprint(model.config, scheme),
    )
    fast, slow = (
        KVCache.for_model(model, scheme, calibration=calibration, backend=backend) for backend in ("auto", "reference")
    )
    parts = [(0, 300), (300, 340), (340, 540), *((540 + i, 541 + i) for i in range(80))]
    got, want = feed(model, fast, ids, mask, parts), feed(model, slow, ids, mask, parts)
    error = ((got - want).norm() / want.norm()).item()
    ops = fast.explain()["ops"]
    print(f"relative difference {error:.4f}; {ops}")
    assert error < 0.05
    assert all(" by cuda" in op for op in ops) and len(ops) > 3


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq3", "nuq2-1%", "nuq3-1%, a layer in int8"])
def test_codebooks_of_each_layer_are_read_by_gpu_kernels(model, name):
    """Layers have codebooks of their own and one plan; the reference closes their pages."""
    gen = torch.Generator().manual_seed(4)
    name, *mixed = name.split(",")
    entries = 2 ** schemes.get(name).key.bits
    books = [
        {f"{kind}_codebook": (torch.rand(2, entries, generator=gen) * 2 - 1).sort(-1).values for kind in "kv"}
        for _ in range(3)
    ]
    int8 = schemes.get("int8").key
    overrides = (Override(layers=(1,), key=int8, value=int8),) if mixed else ()
    scheme = schemes.for_layers(name, KVCache.for_model(model, "raw").pages.spec.layers, overrides=overrides)
    calibration = Calibration(books, fingerprint(model.config, scheme))
    ids = torch.randint(2, 211, (3, 400), generator=torch.Generator().manual_seed(5)).to("cuda")
    mask = torch.ones(3, 400, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    fast, slow = (
        KVCache.for_model(model, scheme, calibration=calibration, backend=backend) for backend in ("auto", "reference")
    )
    got, want = feed(model, fast, ids, mask), feed(model, slow, ids, mask)
    error = ((got - want).norm() / want.norm()).item()
    ops = fast.explain()["ops"]
    print(f"{name}: relative difference {error:.4f}; {ops}")
    assert error < 0.05
    assert all(" by cuda" in op or "close by reference" in op for op in ops) and len(ops) > 3


def test_generation_runs_on_the_gpu(model):
    ids = torch.randint(2, 211, (2, 200), generator=torch.Generator().manual_seed(2)).to("cuda")
    cache = KVCache.for_model(model, "int8")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=100, do_sample=False
    )
    assert out.shape == (2, 300)
    assert cache.pages.seq_lens == [299, 299]


def feed_layers(cache, batch, count, seed, spoil=None, valid=None):
    """A pass of `count` random tokens through all layers; `spoil`: (layer, number) for one key."""
    g = torch.Generator().manual_seed(seed)
    for layer in range(len(cache.spec.layers)):
        q, k, v = (torch.randn(batch, count, heads, 128, generator=g).bfloat16().cuda() for heads in (8, 2, 2))
        if spoil and spoil[0] == layer:
            k[-1, 3, 1, 7] = spoil[1]
        yield lambda layer=layer, q=q, k=k, v=v: cache.step(layer, q, k, v, scaling=0.1, valid=valid)


def run_without_waiting(steps, monkeypatch):
    """Runs the layers of a pass with waits for the GPU as errors; returns how often its end waited."""
    settle, ends = later.Findings.settle, []

    def at_the_end(findings):
        torch.cuda.set_sync_debug_mode("default")
        ends.append(len(findings._asked))
        settle(findings)

    monkeypatch.setattr(later.Findings, "settle", at_the_end)
    try:
        for step in list(steps):
            torch.cuda.set_sync_debug_mode("error")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        monkeypatch.setattr(later.Findings, "settle", settle)
    return len(ends)


@pytest.mark.filterwarnings("ignore:.*Synchronization debug mode")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    "scheme",
    ["raw", "int8_centered", "int4", "kivi4", schemes.get("int8", residual_length=0, token_local=True)],
    ids=str,
)
def test_a_prompt_waits_once_at_its_end(scheme, padded, monkeypatch):
    chosen = schemes.get(scheme) if isinstance(scheme, str) else scheme
    layers = (LayerGeometry(num_kv_heads=2, head_dim=128),) * 3
    cache = PagedCache(CacheSpec(scheme=chosen, layers=layers), device="cuda", batch_size=2, max_tokens=8192)
    for seed, count in enumerate((700, 600, 300, 700, 600, 300)):  # the first three compile and choose
        valid = (torch.arange(count) >= torch.tensor([[0], [40]])).cuda() if padded else None
        if seed < 3:
            for step in feed_layers(cache, 2, count, seed, valid=valid):
                step()
            continue
        cache.begin(2, count, valid)
        assert run_without_waiting(feed_layers(cache, 2, count, seed, valid=valid), monkeypatch) == 1
    assert cache.seq_lens == [3200, 3200 - 240 * padded]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("scheme", ["raw", "int8_centered", "kivi4"])
def test_bad_numbers_of_a_prompt_are_found_at_its_end_and_leave_no_trace(scheme, bad):
    layers = (LayerGeometry(num_kv_heads=2, head_dim=128),) * 3
    cache, clean = (
        PagedCache(CacheSpec(scheme=schemes.get(scheme), layers=layers), device="cuda", batch_size=2, max_tokens=4096)
        for _ in "ab"
    )
    for c in (cache, clean):
        for step in feed_layers(c, 2, 500, 0):
            step()
    if scheme != "raw" or bad != 3e38:
        with raises(DataError, "keys", "layer 1"):
            for step in feed_layers(cache, 2, 300, 1, (1, bad)):
                step()
    assert not cache.in_pass and cache.seq_lens == [500, 500]
    for c in (cache, clean):
        for step in feed_layers(c, 2, 300, 2):
            step()
    for layer in range(3):
        for row in range(2):
            assert all(
                torch.equal(a, b)
                for a, b in zip(cache.dequantize(layer, row), clean.dequantize(layer, row), strict=True)
            )
