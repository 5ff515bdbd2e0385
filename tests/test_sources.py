"""One test for each source document: it fails when a capability that the document describes is gone.

Details are tested beside the code. Here each capability is used once, on small inputs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.calibrate import calibrate
from kvbits.cli import app
from kvbits.evaluate.caches import factory
from kvbits.evaluate.check import check
from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.tasks import Context, load
from kvbits.evaluate.texts import Text, novel
from kvbits.integrations.huggingface import KVCache
from kvbits.model_ref import ModelRef
from kvbits.ops.cuda import ahead
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.planner import plan, uniform
from kvbits.spec import CacheSpec, LayerGeometry, Override, PerGroup, QuantSpec, Rotary, Scheme, Tier

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

HEADS, QUERY_HEADS, D = 2, 4, 64
SCALING = D**-0.5
ROTARY = Rotary(inv_freq=tuple(10_000.0 ** (-i / (D // 2)) for i in range(D // 2)))
GEOMETRY = LayerGeometry(num_kv_heads=HEADS, head_dim=D, rotary=ROTARY)
NO_NVRTC = cuda_compile.missing()
pytestmark = pytest.mark.filterwarnings("ignore::kvbits.errors.KvbitsWarning", "ignore::FutureWarning")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Kernels are compiled and not found from an earlier run."""
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path / "kernels"))


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def text_ids():
    return torch.tensor(tiny.tokenizer()(novel()[:1024])["input_ids"]).view(2, 512)


def numbers(tokens: int, rows: int = 1, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(rows, tokens, heads, D).bfloat16()


def cache_of(scheme: Scheme | str, layers: int = 1, **options) -> PagedCache:
    scheme = schemes.get(scheme) if isinstance(scheme, str) else scheme
    return PagedCache(CacheSpec(scheme=scheme, layers=(GEOMETRY,) * layers), **options)


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """Norm of x - y over that of y."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def attended(cache: PagedCache, rows: int = 1) -> list[float]:
    """Attend with one more token; the relative error of each row against float64 over what the cache holds."""
    q, k, v = numbers(1, rows, QUERY_HEADS), numbers(1, rows), numbers(1, rows)
    out = cache.step(0, q, k, v, scaling=SCALING)
    found = []
    for row in range(rows):
        held_k, held_v = (x.repeat_interleave(2, dim=1) for x in cache.dequantize(0, row, torch.float64))
        weights = (torch.einsum("hd,thd->ht", q[row, 0].double(), held_k) * SCALING).softmax(-1)
        found.append(relative(out[row, 0], torch.einsum("ht,thd->hd", weights, held_v)))
    return found


def test_1_int8_gpu_paper(own_cache):
    """GPU-accelerated INT8 quantization for KV cache compression in large language models (1_int8_gpu_paper)."""
    from studies.int8_paper import cpu, cuda, reference, study

    assert list(study.CASES.values())[:8] == [
        (2048, 128),
        (16384, 256),
        (65536, 256),
        *((131072, d) for d in (256, 1024, 2048, 4096, 8192)),
    ]
    for _, columns in list(study.CASES.values())[:8]:
        x = study.random_matrix(256, columns)
        scales = reference.compute_scales(x)
        torch.testing.assert_close(scales[2:], x[:, 2:].abs().amax(0) / 127)
        q = reference.quantize(x, scales)
        back = reference.dequantize(q, scales)
        assert study.max_error(x, back) <= study.ERROR_BOUND * 1.0001 and study.ERROR_BOUND == 1 / 254
        assert 0 < study.l2_error(x, back) <= x.numel() ** 0.5 * study.ERROR_BOUND
        assert 0 < study.attention_error(x, back) < 0.1
    if cpu.unavailable() is None:
        for kernel in cpu.KERNELS:
            theirs = cpu.quantize(x, cpu.compute_scales(x, kernel=kernel), kernel=kernel)
            assert int((theirs.int() - q.int()).abs().max()) <= 1
    stored = cache_of("int8_per_channel")
    assert stored.spec.scheme.key.granularity == stored.spec.scheme.value.granularity
    stored.append(0, numbers(200), numbers(200))
    assert max(attended(stored)) < 0.01
    if NO_NVRTC is None:
        binary = cuda_compile.compile_source(
            cuda_compile.Source(Path(cuda.__file__).parent, "matrix.cu", cuda.defines(torch.float32, 128)), "sm_90"
        )
        for kernel in ("naive", "tiled", "coarsened", "vectorized"):
            for stage in ("quantize", "dequantize"):
                assert f"{stage}_{kernel}".encode() in binary.cubin


def test_2_fp8_and_int8_article(model, text_ids, tmp_path):
    """KV cache quantization with FP8, INT8 and INT4 (2_fp8_int8_article)."""
    k, v = numbers(300), numbers(300)
    k[:, :, 0] *= 1000  # a scale for each head: head 1 does not pay for head 0
    for name, most in (("fp8", 0.04), ("fp8_e5m2_keys", 0.08), ("int8", 0.01), ("int4", 0.12)):
        cache = cache_of(name)
        cache.append(0, k, v)
        held_k, held_v = (x[:192] for x in cache.dequantize(0, 0))
        for head in range(HEADS):
            assert 0 < relative(held_k[:, head], k[0, :192, head]) < most
            assert 0 < relative(held_v[:, head], v[0, :192, head]) < most
        # packed pages are attended to as they are, on a CPU too
        assert max(attended(cache)) < 0.01
        assert "attend by cpu" in cache.explain()["ops"]
        assert cache.spec.bits_per_element == pytest.approx(8.25 if name != "int4" else 4.5)
    static = calibrate(model, list(text_ids.view(8, 128).split(1)), "int8_static")
    assert static.static[0]["k_scale"].shape[0] == HEADS and (static.static[0]["k_scale"] > 0).all()
    with torch.no_grad():
        kept = KVCache.for_model(model, "int8_static", calibration=static)
        got = model(text_ids[:1, :200], past_key_values=kept).logits
        want = model(text_ids[:1, :200]).logits
    assert relative(got, want) < 0.05
    # memory and accuracy tables: perplexity, MMLU, HumanEval, throughput
    mmlu = {"subject": "s", "question": "q?", "choices": ["w", "x", "y", "z"], "answer": 1}
    code = {"task_id": "T/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    pass\n"}
    for name, rows in (("mmlu", [mmlu] * 2), ("mmlu_dev", [mmlu] * 5), ("humaneval", [code])):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = Options(
        data={n: str(tmp_path / n) for n in ("mmlu", "mmlu_dev", "humaneval")}, shots=1, windows=1, length=128, limit=1
    )
    found = Evaluation(
        name="tiny",
        schemes=["int8"],
        tasks=["fidelity", "mmlu"],
        texts=(Text("t", novel()[:1000]),),
        out=tmp_path / "out",
        options=options,
    ).run(model, tiny.tokenizer(), progress=False)
    assert abs(found["fidelity"]["int8"]["ppl_change"]) < 0.05 and found["mmlu"]["int8"]
    assert load("humaneval")(Context(ModelRef.of(model), tiny.tokenizer(), (), options)).item_keys()
    assert CliRunner().invoke(app, ["bench", "--help"]).exit_code == 0


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x: [B, T, H, D] turned by the rotary embedding of positions 0 to T - 1."""
    angle = torch.arange(x.shape[1])[:, None].double() * torch.tensor(ROTARY.inv_freq).double()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.double().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def test_3_kvquant(model, text_ids, own_cache):
    """KVQuant: towards 10 million context length inference with KV cache quantization (3_kvquant_review)."""
    codebooks = calibrate(model, [text_ids[:1, :200]], "nuq3-1%")  # weighted by Fisher information
    books = codebooks.static[0]
    assert books["k_codebook"].shape == (HEADS, 8) and (books["k_codebook"].diff() > 0).all()
    assert books["k_codebook"].diff().std() > 1e-3, "levels are not evenly spaced"

    def stored(scheme: Scheme, k: torch.Tensor) -> tuple[torch.Tensor, PagedCache]:
        cache = cache_of(scheme, static=[books] if scheme.needs_calibration else None)
        cache.append(0, k, numbers(k.shape[1]))
        return cache.dequantize(0, 0)[0], cache

    nuq = schemes.get("nuq3-1%", residual_length=0)
    # keys before the rotary embedding, a range for each channel: large channels do not cost the others
    k = torch.randn(1, 640, HEADS, D)
    k[..., 3] += 20
    k[..., 40] -= 20
    k = rotated(k).bfloat16()
    post = dataclasses.replace(nuq, key=dataclasses.replace(nuq.key, pre_rope=False))
    before, after = (relative(stored(s, k)[0][64:512], k[0, 64:512]) for s in (nuq, post))
    assert before < after / 2
    # sparse outliers keep their values, the sink its bytes
    spiked = numbers(256)
    spiked[0, 100, 0, 5], spiked[0, 0] = 80.0, 500.0
    plain = dataclasses.replace(nuq, key=dataclasses.replace(nuq.key, outliers=0.0))
    listed, unlisted = stored(nuq, spiked)[0], stored(plain, spiked)[0]
    assert torch.equal(listed[0].bfloat16(), spiked[0, 0]), "attention sinks stay in 16 bits"
    assert relative(listed[64:128, 0], spiked[0, 64:128, 0]) < relative(unlisted[64:128, 0], spiked[0, 64:128, 0])
    assert listed[100, 0, 5].item() == pytest.approx(80, rel=0.01)
    # CPUs unpack the pages, and attention is right
    for name in ("nuq4-1%", "nuq3-1%", "nuq2"):
        scheme = schemes.get(name)
        levels = torch.linspace(-1, 1, 2**scheme.key.bits).expand(HEADS, -1).contiguous()
        cache = cache_of(scheme, static=[{"k_codebook": levels, "v_codebook": levels}])
        cache.append(0, numbers(300), numbers(300))
        assert max(attended(cache)) < 0.01
    if NO_NVRTC is None:
        spec = CacheSpec(scheme=schemes.get("nuq4-1%"), layers=(GEOMETRY,))
        launched = ahead.of_group(spec.groups[0], QUERY_HEADS, torch.bfloat16, False, (9, 0))
        fused = [s for s in launched if "kvquant" in s.folder.parts]
        assert fused, "attention reads packed codes in a kernel of its own"
        assert all(b.cubin for b in ahead.compiled(fused[:1], (9, 0)))


def test_4_tiered_cache():
    """Dynamic KV cache quantization in tiers (4_tiered_cache)."""
    from studies.__main__ import app as studies

    tiers = Scheme(
        name="tiers",
        key=dataclasses.replace(schemes.get("tiered").key),
        value=schemes.get("tiered").value,
        num_sink_tokens=4,
        residual_length=64,
        page_size=32,
        tiers=(Tier(num_tokens=128),),
    )
    cache, lengths = cache_of(tiers), (500, 350)
    k, v = numbers(500, rows=2), numbers(500, rows=2)
    valid = torch.arange(500) >= torch.tensor([500 - n for n in lengths])[:, None]  # left padding
    cache.append(0, k, v, valid=valid)
    assert cache.seq_lens == list(lengths)
    for row, length in enumerate(lengths):
        held, given = cache.dequantize(0, row)[0], k[row, 500 - length :]
        assert torch.equal(held[:4].bfloat16(), given[:4]), "sinks"
        assert torch.equal(held[-64:].bfloat16(), given[-64:]), "hot tokens"
        cold, warm = held[4:36], held[length - 64 - 96 : length - 64 - 32]
        assert relative(warm, given[length - 160 : length - 96]) < 0.02 < relative(cold, given[4:36]) < 0.2
    assert max(attended(cache, rows=2)) < 0.01
    # pages age one by one as tokens come: the same tokens end in the same formats
    grown = cache_of(tiers)
    for i in range(0, 500, 50):
        grown.append(0, k[:1, i : i + 50], v[:1, i : i + 50])
    held = grown.dequantize(0, 0)[0]
    assert relative(held[4:36], k[0, 4:36]) > 0.02 > relative(held[350:400], k[0, 350:400])
    # speculation: rejected tokens leave no trace
    was = [x.clone() for x in grown.dequantize(0, 0)]
    grown.keep_past()
    grown.append(0, numbers(8), numbers(8))
    grown.crop(500)
    assert grown.seq_lens == [500] and all(map(torch.equal, grown.dequantize(0, 0), was))
    # boundaries change while running: pages past a smaller one are recoded at once
    grown.set_tiers(0, [32])
    assert relative(grown.dequantize(0, 0)[0][350:380], k[0, 350:380]) > 0.02
    assert max(attended(grown)) < 0.01
    # the memory figures of the 32k example, the article's and ours
    printed = CliRunner().invoke(studies, ["sources", "--json"])
    figures = {f["printed"]: f["nbytes"] for f in json.loads(printed.stdout)["sources"]}
    assert figures["17.2 GB"] == 17_179_869_184 and figures["7.47 GB"] == 7_482_638_336
    spec = CacheSpec(scheme=schemes.get("tiered"), layers=(LayerGeometry(num_kv_heads=32, head_dim=128),) * 32)
    assert spec.nbytes(32768) == 7_400_849_408 < figures["7.47 GB"]


def test_5_production_guide(model, text_ids):
    """KV cache quantization, a production guide (5_production_guide)."""
    int8 = schemes.get("int8")
    assert int8.key == int8.value == QuantSpec(format="int8", granularity=PerGroup(64)) and int8.key.symmetric
    # a scale for each group of 64, page, head and side: the other group does not pay for a large one
    wide = CacheSpec(scheme=int8, layers=(LayerGeometry(num_kv_heads=1, head_dim=128),))
    grouped = PagedCache(wide)
    k = torch.randn(1, 200, 1, 128).bfloat16()
    k[..., :64] *= 1000
    grouped.append(0, k, k)
    for held in grouped.dequantize(0, 0):
        assert relative(held[:128, 0, 64:], k[0, :128, 0, 64:]) < 0.01
    # scales travel with their pages
    was = grouped.dequantize(0, 0)
    grouped.swap_in(0, grouped.swap_out(0))
    assert all(map(torch.equal, grouped.dequantize(0, 0), was))
    # tokens are quantized when they are written, and dequantized inside attention
    on_write = cache_of(dataclasses.replace(int8, token_local=True))
    new = numbers(1)
    on_write.append(0, new, new)
    assert 0 < relative(on_write.dequantize(0, 0)[0], new[0]) < 0.01
    on_write.append(0, numbers(300), numbers(300))
    assert max(attended(on_write)) < 0.01 and "attend by cpu" in on_write.explain()["ops"]
    # percentile calibration, and how often numbers saturate
    prompts = list(text_ids.view(8, 128).split(1))
    tight, whole = (calibrate(model, prompts, "int8_static", percentile=p) for p in (99.0, 100.0))
    assert all((a["k_scale"] < b["k_scale"]).all() for a, b in zip(tight.static, whole.static, strict=True))
    saturating = []
    for calibration in (tight, whole):
        cache = KVCache.for_model(model, "int8_static", calibration=calibration)
        with torch.no_grad():
            model(torch.cat(prompts[:4], 1), past_key_values=cache)
        saturating.append(sum(n for layer in cache.explain()["saturated"].values() for n in layer.values()))
    assert saturating[0] > saturating[1] == 0
    # planner
    rows = {r.scheme: r for r in plan(uniform(32, 8, 128), ["fp16", "int8", "int4"], context=8192).rows}
    sizes = [r.total_bytes for r in rows.values()]
    assert sizes[0] > 1.8 * sizes[1] and sizes[0] > 3 * sizes[2]
    # guardrails: logit cosine and perplexity
    found = check(model, text_ids, "int8", progress=False)
    assert all(0.99 < v.measures["logit_cosine"] <= 1 for v in found.layers)
    assert abs(found.overall["ppl_change"]) < 0.01
    # stress tests: repeated entities, long contexts
    entities = load("entities")(
        Context(ModelRef.of(model), tiny.tokenizer(), (), Options(contexts=(3000,), depths=(0.5,), chunk=512))
    )
    asked = entities.item(entities.item_keys()[0])[0]
    assert len(asked) == 3000 and entities.answers(factory(model, "int8"), entities.item_keys())
    for name in ("int8", "int8k_int4v"):
        cache = cache_of(name)
        cache.append(0, numbers(20_000), numbers(20_000))
        assert max(attended(cache)) < 0.01
    # fallbacks: first and last layer in 16 bits; INT8 keys with INT4 values
    raw = Override(layers=(0, 2), key=QuantSpec.raw(), value=QuantSpec.raw())
    cache = cache_of(dataclasses.replace(schemes.get("int4"), overrides=(raw,)), layers=3)
    k, v = numbers(200), numbers(200)
    for layer in range(3):
        cache.append(layer, k, v)
    assert [torch.equal(cache.dequantize(layer, 0)[0].bfloat16(), k[0]) for layer in range(3)] == [True, False, True]
    mixed = cache_of("int8k_int4v")
    mixed.append(0, k, v)
    held_k, held_v = mixed.dequantize(0, 0)
    assert relative(held_k[:128], k[0, :128]) < 0.01 < relative(held_v[:128], v[0, :128]) < 0.15
