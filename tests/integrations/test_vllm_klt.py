"""Keys in a calibrated basis (`--kv-cache-dtype kvbits_klt4`, `kvbits_klt3`, `kvbits_klt2`), in vLLM's official wheel
on a CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil

import pytest
import tiny
import torch
from integrations import vllm_cpu
from integrations.inside_vllm import generate, said
from integrations.judged import MODELS, VOCABULARY, check, distance, random_ids, scheme_of
from messages import raises
from nightly import at_night
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from kvbits import schemes
from kvbits.calibrate import Calibration, calibrate, kept
from kvbits.calibrate.moments import Moments
from kvbits.errors import CalibrationError, FileFormatError
from kvbits.geometry import layer_geometries
from kvbits.integrations.rotary import layers_of, with_rotary
from kvbits.integrations.vllm import observe
from kvbits.model_ref import ModelRef
from kvbits.spec import Override, Scheme

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
KLT, FOUR = schemes.get("klt4", head_dim=64), schemes.get("int4", head_dim=64)


@pytest.mark.parametrize("dtype", ["kvbits_klt4", *at_night("kvbits_klt3", "kvbits_klt2")])
def test_tokens_are_those_of_transformers_with_the_same_scheme(model, engine, calibration, dtype):
    """Also over page borders while decoding, past a frame of 512, and again where the prompts are found in the prefix
    cache.
    """
    c = calibration("llama", dtype.removeprefix("kvbits_"))
    llm = engine("llama", dtype, **said(c, raw_newest=0))
    prompts = [random_ids(n, n) for n in (2, 63, 130, 250, 600)]
    for prompt, result in zip(prompts, generate(llm, prompts), strict=True):
        check(model("llama")[0], scheme_of(dtype), prompt, result, calibration=c)
        assert result[2] == 0
    for prompt, result in zip(prompts, generate(llm, prompts), strict=True):
        cached = (len(prompt) - 1) // 64 * 64
        assert result[2] == cached
        check(model("llama")[0], scheme_of(dtype), prompt, result, [n for n in (cached, len(prompt) - cached) if n], c)


def test_chunks_may_begin_and_end_in_the_middle_of_pages(model, engine, calibration):
    c = calibration("llama")
    llm = engine(
        "llama", "kvbits_klt4", **said(c, raw_newest=0), max_num_batched_tokens=48, enable_prefix_caching=False
    )
    for length in (49, 96, 300):
        prompt = random_ids(length, length)
        chunks = [48] * (length // 48) + ([length % 48] if length % 48 else [])
        check(model("llama")[0], scheme_of("kvbits_klt4"), prompt, generate(llm, [prompt])[0], chunks, c)


def test_windows_and_rotary_embeddings_of_two_kinds(model, engine, calibration):
    c = calibration("gemma3")
    llm = engine(
        "gemma3", "kvbits_klt4", **said(c, raw_newest=0), max_num_batched_tokens=96, enable_prefix_caching=False
    )
    for length in (150, 400):
        prompt = random_ids(length, length)
        chunks = [96] * (length // 96) + ([length % 96] if length % 96 else [])
        check(model("gemma3")[0], scheme_of("kvbits_klt4"), prompt, generate(llm, [prompt])[0], chunks, c)


def one_layer():
    torch.manual_seed(6)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=VOCABULARY,
        initializer_range=0.15,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS |= {"one_layer": one_layer, "other": lambda: tiny.model(seed=1)}


@pytest.mark.parametrize("name", ["cohere", *at_night("stablelm")])
def test_channels_in_another_order_are_stored_in_pairs_of_halves(model, engine, calibration, name):
    c = calibration(name)
    llm = engine(name, "kvbits_klt4", **said(c, raw_newest=0), max_num_batched_tokens=48, enable_prefix_caching=False)
    assert all(
        layer.impl.stored.order is not None
        for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    )
    for length in (40, 130):
        prompt = random_ids(length, length)
        chunks = [48] * (length // 48) + ([length % 48] if length % 48 else [])
        check(model(name)[0], scheme_of("kvbits_klt4"), prompt, generate(llm, [prompt])[0], chunks, c)


@pytest.mark.parametrize("name", ["llama", "gemma3", "stablelm", "cohere"])
def test_a_configuration_has_the_rotary_embeddings_of_its_model(model, name):
    loaded = model(name)[0]
    assert layers_of(loaded.config) == with_rotary(layer_geometries(loaded.config), loaded)


@pytest.mark.night
def test_newest_and_first_tokens_are_raw_unless_told_otherwise(model, engine, calibration):
    """Up to 192 tokens every page is the first or one of the newest two: nothing that decodes reads a quantized number."""
    llm = engine("llama", "kvbits_klt2", **said(calibration("llama", "klt2")), enable_prefix_caching=False)
    for n in (1, 64, 127, 150):
        prompt = random_ids(n, n)
        check(model("llama")[0], None, prompt, generate(llm, [prompt], 40)[0])


@pytest.mark.night
def test_tokens_behind_the_raw_ones_are_read_from_finer_copies(model, engine, calibration):
    """Copies of klt4 beside raw ones are nearer to the model than raw ones alone, and those nearer than none. Prompts
    that are found in the prefix cache, and whose copies others wrote over, are read packed.
    """
    c, prompts, far = calibration("llama", "klt2"), [random_ids(n, n) for n in (330, 450)], []
    for more in ({}, {"packed_copies": False}, {"raw_newest": 0}):
        llm = engine("llama", "kvbits_klt2", **said(c, **more), max_num_seqs=1)
        found = [generate(llm, [p], 24)[0] for p in prompts]
        far.append(sum(distance(model("llama")[0], p, r) for p, r in zip(prompts, found, strict=True)))
        if not more:
            hits = [generate(llm, [p], 24)[0] for p in prompts]
            assert [r[2] for r in hits] == [320, 448]
            lost = sum(distance(model("llama")[0], p, r) for p, r in zip(prompts, hits, strict=True))
    assert far[0] < 0.7 * far[1] < 0.7 * far[2] and lost > 2 * far[0], (far, lost)


@pytest.mark.night
def test_random_requests_in_a_tiny_pool(model, engine, calibration):
    """Preempted, recomputed, sharing prefixes, in rows that move, aborted: copies of others are never read."""
    rng = random.Random(0)
    stems = [random_ids(n, n) for n in (64, 128)]
    prompts = [rng.choice(stems)[: rng.randint(1, 128)] + random_ids(rng.randint(1, 50), i) for i in range(30)]
    sizes = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 100, "max_model_len": 512, "max_num_seqs": 6}
    llm = engine("llama", "kvbits_klt4", **said(calibration("llama")), **sizes)
    results = generate(llm, prompts, 60)
    assert sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0
    assert sum(r[2] for r in results) > 0
    found = [distance(model("llama")[0], p, r) for p, r in zip(prompts, results, strict=True)]
    assert sum(found) / len(found) < 0.25 and max(found) < 1, "a copy of another block is far off"


@pytest.mark.timeout(0)
def test_short_requests_of_which_a_third_is_aborted(engine, calibration):
    """In a small pool, newest pages raw: none is lost, and nothing is held at the end.

    Some hundred, 10,000 at night (KVBITS_NIGHT).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    count, rng = 10_000 if os.environ.get("KVBITS_NIGHT") else 100, random.Random(0)
    sizes = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 256, "max_model_len": 256, "max_num_seqs": 8}
    core = engine("one_layer", "kvbits_klt3", **said(calibration("one_layer", "klt3")), **sizes).llm_engine
    stems = [random_ids(n, n) for n in (64, 100)]
    left, aborted, ended = iter(range(count)), set(), {}
    running: dict[str, int] = {}
    more = True
    while more or running:
        while more and len(running) < 24:
            if (number := next(left, None)) is None:
                more = False
                break
            name, want = str(number), rng.randint(1, 16)
            prompt = rng.choice(stems)[: rng.randint(0, 100)] + random_ids(rng.randint(1, 30), number)
            params = SamplingParams(
                max_tokens=want,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            core.add_request(name, {"prompt_token_ids": prompt}, params)
            running[name] = want
        for name in [n for n in running if int(n) % 3 == 2 and rng.random() < 0.3]:
            core.abort_request([name])
            aborted.add(name)
            del running[name]
        for output in core.step():
            assert output.finished and output.request_id not in ended
            if output.request_id in running:
                assert len(output.outputs[0].token_ids) == running.pop(output.request_id)
                ended[output.request_id] = True
    scheduler = core.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    print(
        f"{count} requests: {len(ended)} answered, {len(aborted)} aborted, {pool.get_num_free_blocks()} of"
        f" {pool.num_gpu_blocks - 1} blocks free at the end"
    )
    assert len(ended) + len(aborted) == count and not aborted & set(ended)
    assert not core.has_unfinished_requests() and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_speculation_gives_the_tokens_without_it(model, engine, calibration):
    c = calibration("llama")
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine("llama", "kvbits_klt4", **said(c, raw_newest=0), speculative_config=ngram, enable_prefix_caching=False)
    for prompt in [(random_ids(7, 1) * 30)[:n] for n in (40, 63, 150)]:
        check(model("llama")[0], scheme_of("kvbits_klt4"), prompt, generate(llm, [prompt], 40)[0], calibration=c)


def drafts(path, **options):
    return {
        "speculative_config": {"model": str(path), "num_speculative_tokens": 3, "method": "draft_model"} | options,
        "enable_prefix_caching": False,
    }


def layers_by_owner(llm, count):
    """The implementations of the first `count` layers, and those of all that speculation adds."""
    found = [layer.impl for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    return found[:count], found[count:]


@pytest.mark.night
@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("llama", {}),
        ("other", {}),
        ("other", {"raw_newest": 0}),
    ],
    ids=["itself", "another", "packed"],
)
def test_a_draft_model_has_a_calibration_of_its_own(model, engine, calibration, monkeypatch, tmp_path, draft, options):
    """Kept in the cache folder, while the model's is a file.

    What it drafts changes no token: raw ones where copies hold all of them, else those of the format.
    """
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    c, (_, path) = calibration("llama"), model(draft)
    with kept.keeping(kept.key_of(ModelRef(path, model(draft)[0].config))) as file:
        shutil.copy(calibration(draft).path, file)
    llm = engine("llama", "kvbits_klt4", **said(c, calibrate=False, **options), **drafts(path))
    prompts = [(random_ids(7, 1) * 30)[:n] for n in (40, 63, 120)]
    for prompt, result in zip(prompts, generate(llm, prompts, 40), strict=True):
        check(
            model("llama")[0],
            scheme_of("kvbits_klt4") if options else None,
            prompt,
            result,
            calibration=c if options else None,
        )
    drafted, accepted = (
        sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}_tokens")
        for name in ("draft", "accepted")
    )
    print(f"{draft}: {accepted} of {drafted} drafts accepted")
    assert accepted > 0.9 * drafted if draft == "llama" else accepted < 60
    for one in itertools.chain(*layers_by_owner(llm, 2)):
        assert one.call.layout.key.has_offsets and bool(one.call.rings) == (not options)


def test_a_draft_model_that_cannot_be_calibrated_has_another_format(model, engine, calibration, monkeypatch, tmp_path):
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    given, path, prompt = said(calibration("llama"), calibrate=False), model("other")[1], random_ids(50)
    with raises(CalibrationError, path, "kvbits calibrate", '"kv_cache_dtype": "kvbits_int8_centered"'):
        engine("llama", "kvbits_klt4", **given, **drafts(path))
    llm = engine("llama", "kvbits_klt4", **given, **drafts(path, kv_cache_dtype="kvbits_int8_centered"))
    check(model("llama")[0], None, prompt, generate(llm, [prompt])[0])
    own, added = layers_by_owner(llm, 2)
    assert [x.call.layout.is_centered for x in own] == [False, False] and [
        x.call.layout.is_centered for x in added
    ] == [True, True]


def test_heads_that_speculate_are_stored_in_eight_bits(model, engine, calibration, tmp_path):
    """EAGLE, and MTP likewise: layers that no process runs alone.

    They have no copies, since passes of two kinds write to them.
    """
    head = LlamaConfig(
        **model("other")[0].config.to_dict()
        | {
            "num_hidden_layers": 1,
            "attention_bias": False,
            "architectures": ["LlamaForCausalLM"],
        }
    )
    torch.manual_seed(7)
    weights = {
        n.removeprefix("model."): x
        for n, x in AutoModelForCausalLM.from_config(head).state_dict().items()
        if "layers" in n and "input_layernorm" not in n
    }
    save_file(weights | {"fc.weight": torch.randn(128, 256) / 16}, tmp_path / "model.safetensors")
    head.save_pretrained(tmp_path)
    llm = engine("llama", "kvbits_klt4", **said(calibration("llama")), **drafts(tmp_path, method="eagle"))
    prompts = [random_ids(n, n) for n in (40, 63, 120)]
    for prompt, result in zip(prompts, generate(llm, prompts, 40), strict=True):
        check(model("llama")[0], None, prompt, result)
    own, (added,) = layers_by_owner(llm, 2)
    assert added.call.layout.is_centered and added.call.rings == () and all(x.call.rings for x in own)


@pytest.mark.night
def test_layers_of_a_scheme_file(model, engine, calibration, tmp_path):
    last = Override(layers=(-1,), key=FOUR.key, value=FOUR.value)
    two = Scheme(name="two", key=KLT.key, value=KLT.value, overrides=(last,), token_local=True)
    c = calibration("llama", two)
    (tmp_path / "mine.json").write_text(two.to_json())
    given = said(c, raw_newest=0, scheme=str(tmp_path / "mine.json"))
    llm = engine("llama", "kvbits_scheme", **given, max_num_batched_tokens=48, enable_prefix_caching=False)
    for length in (30, 130):
        prompt = random_ids(length, length)
        chunks = [48] * (length // 48) + ([length % 48] if length % 48 else [])
        check(model("llama")[0], two, prompt, generate(llm, [prompt])[0], chunks, c)


def test_pages_arrive_from_another_engine_and_are_read_packed(model, engine, calibration, tmp_path):
    """The receiver's numbers are those of the same format, of which the sender read the first page and the newest raw;
    what it stores itself has copies.
    """
    from integrations.test_vllm_transfer import shared_storage

    c, prompt, transfer = (
        calibration("llama", "klt3"),
        random_ids(300),
        {"kv_transfer_config": shared_storage(tmp_path)},
    )
    own = generate(engine("llama", "kvbits_klt3", **said(c), **transfer), [prompt], 16)[0]
    packed = generate(engine("llama", "kvbits_klt3", **said(c, raw_newest=0), **transfer), [prompt], 16)[0]
    loaded = generate(engine("llama", "kvbits_klt3", **said(c), **transfer), [prompt], 16)[0]
    assert [r[2] for r in (own, packed, loaded)] == [0, 256, 256]
    near, far, between = (distance(model("llama")[0], prompt, r) for r in (own, packed, loaded))
    assert near < between < far


def test_calibrations_that_are_missing_or_of_others_are_refused(engine, calibration, tmp_path):
    with raises(CalibrationError, calibration("gemma3").path, "kvbits calibrate"):
        engine("llama", "kvbits_klt4", **said(calibration("gemma3")))
    with raises(FileFormatError, tmp_path / "none", "kvbits calibrate"):
        engine("llama", "kvbits_klt4", **said(dataclasses.replace(calibration("llama"), path=str(tmp_path / "none"))))


def test_a_calibration_is_found_or_made_once(model, engine, monkeypatch, tmp_path, capfd):
    """By a process of its own, for all widths; the other door finds it too."""
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path))
    none = {"additional_config": {"kvbits": {"calibrate": False, "raw_newest": 0}}}
    with raises(CalibrationError, "kvbits calibrate"):
        engine("llama", "kvbits_klt4", **none)
    path = model("llama")[1]
    # it has no tokenizer
    with raises(CalibrationError, path, "kvbits calibrate", "--engine vllm"):
        engine("llama", "kvbits_klt3")
    tiny.tokenizer().save_pretrained(path)
    generate(engine("llama", "kvbits_klt3"), [random_ids(20)])
    assert capfd.readouterr().err.count("bases ...") == 1
    llm, prompt = engine("llama", "kvbits_klt2", **none), random_ids(200)
    kept = Calibration.load(next((tmp_path / "calibrations").glob("*.safetensors")))
    check(model("llama")[0], scheme_of("kvbits_klt2"), prompt, generate(llm, [prompt])[0], calibration=kept)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_engine_itself_measures_what_transformers_does(model, name):
    prompts = [random_ids(300, i) for i in range(4)]
    own = calibrate(model(name)[0], [torch.tensor(prompts)], "klt4")
    options = vllm_cpu.SETTINGS_OF_ENGINE | {"max_num_batched_tokens": 512}
    found = observe.calibrate(str(model(name)[1]), prompts, options)
    assert found.fingerprint == own.fingerprint
    for ours, theirs in zip(found.static, own.static, strict=True):
        torch.testing.assert_close(ours["k_mean"], theirs["k_mean"], rtol=1e-3, atol=1e-4)
        # directions of equal spread may be turned
        spread, wanted = (x["k_basis"].double() @ x["k_basis"].double().mT for x in (ours, theirs))
        torch.testing.assert_close(spread, wanted, rtol=0, atol=2e-2 * wanted.abs().max().item())


def test_sums_of_ranks_are_those_of_one(model):
    """Kv heads spread over ranks, or shared by several that have some of their queries each."""
    layer, key = layers_of(tiny.model().config)[0], observe.KEY
    q, k, positions = torch.randn(200, 4, 64), torch.randn(200, 2, 64), torch.arange(200)
    own = Moments(key, layer, "")
    own.add(q, k, positions)
    for heads, queries in ((1, 2), (1, 1)):
        parts = []
        for first in range(0, 4, queries):
            part = Moments(key, dataclasses.replace(layer, num_kv_heads=heads), "")
            part.add(q[:, first : first + queries], k[:, first // 2 : first // 2 + 1], positions)
            parts.append(part.state())
        found = observe.whole(key, layer, parts, "").state()
        for name, x in own.state().items():
            torch.testing.assert_close(found[name], x)
