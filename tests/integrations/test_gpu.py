"""Transformers on a GPU: the packed cache through the GPU kernels against the reference on the same pages."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvbits import schemes
from kvbits.calibrate.calibration import Calibration, fingerprint
from kvbits.integrations.huggingface import KVCache
from kvbits.spec import Override, Tier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=211,
        max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.05,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()


def feed(model, cache, ids, mask, parts=((0, 300), (300, 340), *((340 + i, 341 + i) for i in range(6)))):
    """Logits of the last positions: a ragged prompt, a chunk, then single tokens."""
    out = []
    with torch.no_grad():
        for start, end in parts:
            out.append(model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits[:, -1].float())
    return torch.stack(out)


@pytest.mark.parametrize("scheme", ["raw", "int8", "int8_centered", "int8_per_channel", "int4", "int4_centered", "kivi4", "kivi2", "fp8"])
def test_gpu_kernels_and_the_reference_give_the_same_logits(model, scheme):
    ids = torch.randint(2, 211, (3, 400), generator=torch.Generator().manual_seed(1)).to("cuda")
    mask = torch.ones(3, 400, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    mask[2, :290] = 0
    fast, slow = KVCache.for_model(model, scheme), KVCache.for_model(model, scheme, backend="reference")
    got, want = feed(model, fast, ids, mask), feed(model, slow, ids, mask)
    error = ((got - want).norm() / want.norm()).item()
    served = [op for op in fast.explain()["ops"] if op.startswith("attend_pages")]
    print(f"{scheme}: relative difference {error:.4f}; {served}")
    assert error < 0.05
    assert all("by reference" not in op for op in served), served


@pytest.mark.parametrize("demote", ["age", "attention"])
def test_zones_run_through_gpu_kernels_alone(model, demote):
    """Preset `tiered` with zones that fit 900 tokens: raw, 8-bit and 4-bit pages in every step, long chunks over history, demotions while decoding."""
    scheme = schemes.get("tiered", residual_length=64, tiers=(Tier(num_tokens=192),), demote=demote)
    ids = torch.randint(2, 211, (3, 800), generator=torch.Generator().manual_seed(3)).to("cuda")
    mask = torch.ones(3, 800, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    mask[2, :290] = 0
    fast, slow = KVCache.for_model(model, scheme), KVCache.for_model(model, scheme, backend="reference")
    parts = [(0, 300), (300, 340), (340, 540), *((540 + i, 541 + i) for i in range(80))]
    got, want = (feed(model, cache, ids, mask, parts=parts) for cache in (fast, slow))
    error = ((got - want).norm() / want.norm()).item()
    ops = fast.explain()["ops"]
    print(f"{demote}: relative difference {error:.4f}; {ops}")
    assert error < (0.05 if demote == "age" else 0.1), "which page leaves a zone may hang on a rounding"
    assert {op.split(" (")[0] for op in ops} == {"append by cuda", "attend_fresh by cuda", "attend_pages by cuda", "close_pages by cuda"}
    (layers,) = fast.explain()["layers"]
    used = {name: pages["used"] for name, pages in layers["pages"].items()}
    assert all(used.values()) and used["low0"] < used["closed"], "all zones are there"


@pytest.mark.parametrize("name", ["nuq4-1%", "nuq3", "nuq2-1%", "nuq3-1%, a head in int8"])
def test_codebooks_of_each_layer_run_through_gpu_kernels_alone(model, name):
    """Layers have codebooks of their own and one plan; pages close and are read on the GPU."""
    gen = torch.Generator().manual_seed(4)
    name, *mixed = name.split(",")
    entries = 2 ** schemes.get(name).key.bits
    books = [{f"{kind}_codebook": (torch.rand(2, entries, generator=gen) * 2 - 1).sort(-1).values for kind in "kv"} for _ in range(3)]
    int8 = schemes.get("int8").key
    overrides = (Override(layers=(1,), heads=(0,), key=int8, value=int8),) if mixed else ()
    scheme = schemes.for_layers(name, KVCache.for_model(model, "raw").store.spec.layers, overrides=overrides)
    calibration = Calibration(books, fingerprint(model.config, scheme))
    ids = torch.randint(2, 211, (3, 400), generator=torch.Generator().manual_seed(5)).to("cuda")
    mask = torch.ones(3, 400, dtype=torch.long, device="cuda")
    mask[1, :170] = 0
    fast, slow = (KVCache.for_model(model, scheme, calibration=calibration, backend=backend) for backend in ("auto", "reference"))
    got, want = feed(model, fast, ids, mask), feed(model, slow, ids, mask)
    error = ((got - want).norm() / want.norm()).item()
    ops = fast.explain()["ops"]
    print(f"{name}: relative difference {error:.4f}; {ops}")
    assert error < 0.05
    assert {op.split(" (")[0] for op in ops} == {"append by cuda", "attend_fresh by cuda", "attend_pages by cuda", "close_pages by cuda"}


def test_generation_runs_on_the_gpu(model):
    ids = torch.randint(2, 211, (2, 200), generator=torch.Generator().manual_seed(2)).to("cuda")
    cache = KVCache.for_model(model, "int8")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=100, do_sample=False)
    assert out.shape == (2, 300)
    assert cache.store.seq_lens == [299, 299]
