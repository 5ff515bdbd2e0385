"""SGLang on a GPU with kvbits' pages: captured graphs against eager steps, decoding against prompts, chunks, prefix
hits, pages from host memory, aborts, drafts of n-grams, and Transformers under the same scheme. Run by hand, one format a process; the
environment is benchmarks/sglang_bundle.sh's where there is no network.

    python tests/integrations/check_sglang_gpu.py --format int8_centered
    python tests/integrations/check_sglang_gpu.py --format klt4 --model MODEL

Without a model on disk a small random one serves, so the distances are noise of quantization, to be compared with those
of `--format bf16` on the same machine. What must hold is checked; every line is printed as JSON. On a CPU, in the
environment of run_sglang_cpu.sh, the same is asked of engines there (`--baseline torch_native`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

LIMITS = {
    "bf16": {"prefill": 0.015, "again": 0.006, "eager": 0.006},
    "int8_centered": {"prefill": 0.06, "again": 0.02, "eager": 0.006},
    "int4": {"prefill": 1.0, "again": 0.1, "eager": 0.02},
    "klt4": {"prefill": 1.0, "again": 0.1, "eager": 0.02},
}
"""Largest mean distance of log-probabilities by format and check, of the random model and without raw copies: two to
four times what an H100 measured (bf16 0.007 and 0.001, int8_centered 0.035 and 0.008, int4 0.52 and 0.007, klt4 0.49
and 0.011; steps in graphs and eager ones were equal).
"""
CHUNK = 768
DEVICE, DTYPE = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")


def saved_model(path: Path) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=1024,
        vocab_size=1000,
        max_position_embeddings=8192,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        num_key_value_heads=2,
        head_dim=128,
        num_hidden_layers=3,
        num_attention_heads=8,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPE))
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path


def engine(path: Path, form: str, baseline: str, **more: Any) -> Any:
    import sglang

    settings: dict[str, Any] = {
        "dtype": DTYPE,
        "device": DEVICE,
        "skip_tokenizer_init": True,
        "max_total_tokens": 1 << 16,
        "max_running_requests": 16,
        "chunked_prefill_size": CHUNK,
        "context_length": 4096,
        "log_level": "error",
        "mem_fraction_static": 0.3,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16],
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    start = time.monotonic()
    found = sglang.Engine(
        model_path=str(path), attention_backend=baseline if form == "bf16" else f"kvbits_{form}", **(settings | more)
    )
    print(json.dumps({"format": form, "started_s": round(time.monotonic() - start, 1)} | more), flush=True)
    return found


def sampling(n: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}


def generate(llm: Any, prompts: list[list[int]], n: int, **more: Any) -> list[Any]:
    return llm.generate(input_ids=prompts, sampling_params=sampling(n), return_logprob=True, **more)


def logprobs_of(output: Any) -> torch.Tensor:
    return torch.tensor([x[0] for x in output["meta_info"]["output_token_logprobs"]])


def cached(outputs: list[Any]) -> int:
    return sum(o["meta_info"]["cached_tokens"] for o in outputs)


def distance(a: list[Any], b: list[Any]) -> tuple[float, float]:
    """Mean distance of log-probabilities while tokens agree, and the share of tokens that do."""
    found, same, total = [], 0, 0
    for x, y in zip(a, b, strict=True):
        s, t = x["output_ids"], y["output_ids"]
        n = next((i for i, (u, v) in enumerate(zip(s, t, strict=True)) if u != v), len(s))
        found.append((logprobs_of(x)[:n] - logprobs_of(y)[:n]).abs())
        same, total = same + n, total + len(s)
    return torch.cat(found).mean().item(), same / total


def against_prefill(llm: Any, prompts: list[list[int]], outputs: list[Any]) -> float:
    """Mean distance of the log-probabilities that decoding gave and those that the same tokens have as prompts."""
    llm.flush_cache()
    again = generate(llm, [p + o["output_ids"] for p, o in zip(prompts, outputs, strict=True)], 1, logprob_start_len=0)
    found = []
    for prompt, output, whole in zip(prompts, outputs, again, strict=True):
        mine = torch.tensor([x[0] for x in whole["meta_info"]["input_token_logprobs"][len(prompt) :]])
        found.append((mine - logprobs_of(output)).abs())
    return torch.cat(found).mean().item()


def against_transformers(
    path: Path, form: str, calibration: str | None, prompts: list[list[int]], outputs: list[Any]
) -> tuple[float, float]:
    """Mean distance of an engine's log-probabilities from those of kvbits' cache of Transformers under the same scheme,
    on this GPU, and from those without any.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvbits import schemes
    from kvbits.calibrate import Calibration
    from kvbits.integrations.engine.served import FORMATS
    from kvbits.integrations.huggingface import KVCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, DTYPE)).to(DEVICE).eval()
    heads = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    scheme = None if form == "bf16" else schemes.fitted(FORMATS[f"kvbits_{form}"].scheme, heads)
    basis = Calibration.load(calibration) if calibration else None
    near, far = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids, got = torch.tensor([prompt + output["output_ids"]], device=DEVICE), logprobs_of(output)
        parts = [*[CHUNK] * (len(prompt) // CHUNK), len(prompt) % CHUNK, *[1] * (len(got) - 1)]
        cache: Any = DynamicCache() if scheme is None else KVCache.for_model(model, scheme, calibration=basis)
        logits, at = [], 0
        with torch.no_grad():
            for n in (x for x in parts if x):
                logits.append(model(ids[:, at : at + n], past_key_values=cache).logits[0, -1])
                at += n
            exact = model(ids).logits[0, len(prompt) - 1 : -1]
        for found, x in ((near, torch.stack(logits[-len(got) :])), (far, exact)):
            want = x.float().log_softmax(-1).cpu()[torch.arange(len(got)), torch.tensor(output["output_ids"])]
            found.append((want - got).abs())
    return torch.cat(near).mean().item(), torch.cat(far).mean().item()


def aborted(llm: Any, prompts: list[list[int]]) -> None:
    """Requests that are given up leave the others alone."""
    alone = generate(llm, prompts[:4], 40)

    async def ask(i: int) -> Any:
        found = None
        stream = await llm.async_generate(
            input_ids=prompts[i],
            sampling_params=sampling(40 if i < 4 else 400),
            rid=f"r{i}",
            stream=True,
            return_logprob=True,
        )
        async for output in stream:
            found = output
            if i >= 4 and output["meta_info"]["completion_tokens"] > i:
                llm.tokenizer_manager.abort_request(f"r{i}")
        return found

    async def everything() -> list[Any]:
        return await asyncio.gather(*map(ask, range(8)))

    ended = llm.loop.run_until_complete(everything())
    assert [o["meta_info"]["finish_reason"]["type"] for o in ended] == ["length"] * 4 + ["abort"] * 4, [
        o["meta_info"]["finish_reason"] for o in ended
    ]
    assert all(len(o["meta_info"]["output_token_logprobs"]) == 40 for o in ended[:4])
    print(json.dumps({"check": "beside aborted ones", "mean_distance": distance(alone, ended[:4])[0]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", required=True, choices=LIMITS)
    parser.add_argument(
        "--model",
        type=Path,
        help=(
            "a model on disk; of the distances only that from Transformers is then checked, against what the format"
            " costs"
        ),
    )
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--baseline", default="fa3", help="SGLang's own backend, of --format bf16")
    parser.add_argument("--engine", type=json.loads, default={}, help="more options of all engines, JSON")
    parser.add_argument(
        "--only", nargs="*", default=["prefill", "again", "transformers", "abort", "eager", "host", "drafts"]
    )
    args = parser.parse_args()
    form, path = args.format, args.model or saved_model(Path(tempfile.mkdtemp()) / "model")
    basis = calibrated(path, form) if form.startswith("klt") else None
    if basis:
        os.environ["KVBITS_SGLANG"] = json.dumps({"calibration": basis, "raw_newest": 0})
    draw = torch.Generator().manual_seed(1)
    lengths = (1, 5, 63, 64, 65, 127, 128, 300, 700, 767, 768, 769, 1500, 2000, 17, 1000)
    prompts = [torch.randint(3, 1000, (n,), generator=draw).tolist() for n in lengths]
    failed = []

    def say(check: str, value: float, limit: float | None, **more: Any) -> None:
        print(
            json.dumps({"format": form, "check": check, "mean_distance": round(value, 5), "limit": limit} | more),
            flush=True,
        )
        if limit is not None and not value < limit:
            failed.append(check)

    limits = dict.fromkeys(LIMITS[form]) if args.model else LIMITS[form]
    llm = engine(path, form, args.baseline, **args.engine)
    first = generate(llm, prompts, args.tokens)
    assert all(torch.isfinite(logprobs_of(o)).all() for o in first), "log-probabilities that are not finite"
    if "again" in args.only:
        again = generate(llm, prompts, args.tokens)
        far, same = distance(first, again)
        say(
            "again, from the radix cache", far, limits["again"], cached_tokens=cached(again), same_tokens=round(same, 3)
        )
        assert cached(again) > 5000, f"only {cached(again)} tokens were found again"
    if "prefill" in args.only:
        say("decoding against prompts", against_prefill(llm, prompts, first), limits["prefill"])
    if "transformers" in args.only:
        llm.flush_cache()
        some = [prompts[i] for i in (1, 3, 7, 11, 12)]
        alone = [generate(llm, [p], args.tokens)[0] for p in some]
        near, exact = against_transformers(path, form, basis, some, alone)
        say("Transformers under the same scheme", near, 0.05 + 0.3 * exact, without=round(exact, 5))
    if "abort" in args.only:
        aborted(llm, prompts)
    llm.shutdown()
    if "eager" in args.only:
        llm = engine(path, form, args.baseline, **args.engine | {"disable_cuda_graph": True})
        far, same = distance(first, generate(llm, prompts, args.tokens))
        say("graphs against eager steps", far, limits["eager"], same_tokens=round(same, 3))
        llm.shutdown()
    for io in ("kernel", "direct") if "host" in args.only else ():
        llm = engine(
            path,
            form,
            args.baseline,
            **args.engine
            | {"max_total_tokens": 4096, "enable_hierarchical_cache": True, "hicache_ratio": 8.0}
            | {"hicache_io_backend": io},
        )
        once, more = ([generate(llm, [p], args.tokens)[0] for p in prompts] for _ in range(2))
        far, same = distance(once, more)
        details = [o["meta_info"]["cached_tokens_details"] or {} for o in more]
        loaded = sum(x.get("host", 0) for x in details)
        say(f"pages from host memory, {io}", far, limits["again"], host_tokens=loaded, same_tokens=round(same, 3))
        assert loaded > 2000, f"only {loaded} tokens came from host memory"
        llm.shutdown()
    if "drafts" in args.only and form != "bf16":  # SGLang's own backend takes trees for chains
        llm = engine(
            path,
            form,
            args.baseline,
            **args.engine | {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
        )
        for check in ("drafts", "drafts, again"):  # by then the corpus of n-grams has the answers
            drafted = generate(llm, prompts, args.tokens)
            (far, same), each = distance(first, drafted), [o["meta_info"]["spec_accept_length"] for o in drafted]
            say(
                check,
                far,
                limits["again"],
                same_tokens=round(same, 3),
                accept_length=round(sum(each) / len(each), 2),
                cached_tokens=cached(drafted),
            )
        assert max(each) > 4, f"hardly a draft was accepted: {each} tokens a step"
        llm.shutdown()
    assert not failed, f"over the limit: {failed}"
    print(json.dumps({"format": form, "passed": True}), flush=True)


def calibrated(path: Path, form: str) -> str:
    """A file of the model's calibration."""
    from transformers import AutoModelForCausalLM

    from kvbits.calibrate import calibrate

    model, file = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, DTYPE)).to(DEVICE),
        str(Path(tempfile.mkdtemp()) / "c.safetensors"),
    )
    calibrate(model, [torch.randint(3, 1000, (4, 1024), generator=torch.Generator().manual_seed(2))], form).save(file)
    return file


if __name__ == "__main__":
    main()
