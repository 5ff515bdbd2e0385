"""Accuracy through stock vLLM: what each `--kv-cache-dtype` does to a real model's log-probabilities, prefill and
decode apart.

    python benchmarks/accuracy_serve_vllm.py MODEL --text wiki.test.raw --kv-cache-dtypes kvbits_int8_centered
    kvbits_klt4 fp8

MODEL is a directory that vLLM can load, with a tokenizer. The text is cut into windows of `--context` + `--scored`
tokens, and the last `--scored` tokens of each are scored twice:

    prefill   the whole window as a prompt in chunks of `--chunk` tokens, with `prompt_logprobs`: older chunks are read
              as they are stored
    decode    the context as a prompt, then the same tokens forced one by one: every token reads what is stored, the
              newest one too

With `--hits` a third phase follows, in all dtypes but the base:

    hit       the prompts and tokens of `decode` again. The prefix cache has the prompts, and prompts of other requests
              have been written over their copies, so the prefix is read packed

Each is compared, position by position, with the same phase of the base (`auto`: the model's own dtype), `hit` with its
decode: KL over the `--top` most probable tokens, all others taken as one (so a lower bound, and exact where they hold
all of the probability), |difference| of the true token's log-probability, perplexity, and how often the most probable
token is the same. The base's decode is compared with its prefill, which is the noise of computing in another order.

Tokens are forced by vLLM's trace replay where its V2 runner serves (GPU), by a logits processor where not;
log-probabilities are the model's own in both. On a CPU it runs in the environment of
tests/integrations/run_vllm_cpu.sh, the base on kvbits' raw pages, which hold the model's own numbers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_files import append, arguments

Position = tuple[float, np.ndarray, np.ndarray]
"""Log-probability of the true token; the most probable tokens, int64; their log-probabilities."""
BASE = "auto"
PAGE = 64
"""Tokens of a block of the prefix cache."""
CACHE_BYTES = 2 << 30
"""Bytes of the cache on a GPU, and of every cache with `--hits`: fixed, so that several such runs can share a GPU."""


def windows(model: Path, text: str, count: int, length: int) -> list[list[int]]:
    """Return `count` runs of `length` tokens of a text, spread over it evenly. Each follows the model's first token
    where it has one.
    """
    from transformers import AutoTokenizer

    from kvbits.evaluate.texts import novel_start, read_text

    tokenizer = AutoTokenizer.from_pretrained(model)
    content = (novel_start() if text == "novel" else read_text(text)).content
    ids = tokenizer(content[: 40 * count * length], add_special_tokens=False, verbose=False).input_ids
    first = (
        []
        if tokenizer.bos_token_id is None or tokenizer("a").input_ids[0] != tokenizer.bos_token_id
        else [tokenizer.bos_token_id]
    )
    step = len(ids) // count
    if step < length:
        raise SystemExit(f"{text} has {len(ids)} tokens, too few for {count} windows of {length}")
    return [[*first, *ids[i * step : i * step + length - len(first)]] for i in range(count)]


def forcing() -> type:
    """Make a logits processor of vLLM's V1 runner that samples only the next token of `extra_args["trace"]`."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Forcing(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self.traces: dict[int, tuple[list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(
                self.traces,
                batch_update,
                lambda params, _, made: ((params.extra_args or {})["trace"], made) if params.extra_args else None,
            )

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            for row, (trace, made) in self.traces.items():
                token = trace[len(made)]
                kept = logits[row, token].clone()
                logits[row] = -torch.inf
                logits[row, token] = kept
            return logits

    return Forcing


def engine(args: argparse.Namespace, dtype: str, settings: dict[str, Any]) -> tuple[Any, bool]:
    """Return `vllm.LLM`, and whether it replays traces by itself."""
    options: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "dtype": args.dtype,
        "max_model_len": args.context + args.scored + 64,
        "max_num_seqs": args.windows,
        "seed": 0,
        "max_num_batched_tokens": max(args.chunk, args.windows),
        "enable_prefix_caching": args.hits,
        "max_logprobs": args.top,
        "skip_tokenizer_init": True,
    }
    if torch.cuda.is_available():
        from vllm import LLM

        replays = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"
        options |= {
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "enable_trace_replay": replays,
        } | ({} if replays else {"logits_processors": [forcing()]})
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [args.windows],
        }
        return LLM(model=str(args.model), **(options | settings)), replays
    import vllm_cpu

    options |= {"logits_processors": [forcing()]} | ({"attention_backend": "KVBITS"} if dtype == BASE else {})
    # a share of it must hold the copies of all windows
    options |= {"kv_cache_memory_bytes": CACHE_BYTES} if args.hits else {}
    return vllm_cpu.engine(args.model, **(options | settings)), False


def close(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def positions(flat: Any, tokens: list[int], first: int) -> list[Position]:
    """Return the log-probabilities of `tokens`, which stand at `first` and behind, from vLLM's flat ones."""
    found = []
    for i, token in enumerate(tokens, first):
        begin, end = flat.start_indices[i], flat.end_indices[i]
        ids, logprobs = np.array(flat.token_ids[begin:end]), np.array(flat.logprobs[begin:end])
        true = float(logprobs[np.flatnonzero(ids == token)[0]])
        # the true token comes first and once more where it is among the most probable
        ids, where = np.unique(ids, return_index=True)
        found.append((true, ids, logprobs[where]))
    return found


def measure(
    args: argparse.Namespace, dtype: str, texts: list[list[int]], settings: dict[str, Any]
) -> dict[str, list[Position]]:
    """Measure the positions of all windows, by phase."""
    from vllm import SamplingParams

    llm, replays = engine(args, dtype, settings)
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "flat_logprobs": True}
    n = args.context
    prompts = llm.generate(
        [{"prompt_token_ids": w} for w in texts],
        SamplingParams(max_tokens=1, prompt_logprobs=args.top, **common),
        use_tqdm=False,
    )
    params = []
    for w in texts:
        trace = {"trace_decode_token_ids": w[n:]} if replays else {"extra_args": {"trace": w[n:]}}
        params.append(SamplingParams(max_tokens=args.scored, logprobs=args.top, **trace, **common))

    def decode(cached: int) -> list[Position]:
        """Return the log-probabilities of the forced tokens behind prompts that begin with so many cached tokens."""
        scored: list[Position] = []
        outputs = llm.generate([{"prompt_token_ids": w[:n]} for w in texts], params, use_tqdm=False)
        for w, out in zip(texts, outputs, strict=True):
            if list(out.outputs[0].token_ids) != w[n:]:
                raise SystemExit("vLLM decoded other tokens than those it was to score")
            if args.hits and out.num_cached_tokens != cached:
                raise SystemExit(f"vLLM found {out.num_cached_tokens} tokens in its prefix cache, not {cached}")
            scored += positions(out.outputs[0].logprobs, w[n:], 0)
        return scored

    found = {
        "prefill": [p for w, out in zip(texts, prompts, strict=True) for p in positions(out.prompt_logprobs, w[n:], n)]
    }
    if args.hits and not llm.reset_prefix_cache():
        raise SystemExit("vLLM did not empty its prefix cache, so no prompt would be computed")
    found["decode"] = decode(0)
    if args.hits and dtype != BASE:
        # requests that run together own all rings of copies: the first still runs when the last has been computed
        steps = len(texts) * (n // args.chunk + 2)
        others = [{"prompt_token_ids": w[:n][::-1]} for w in texts]
        llm.generate(others, SamplingParams(max_tokens=steps, **common), use_tqdm=False)
        found["hit"] = decode((n - 1) // PAGE * PAGE)
    close(llm)
    return found


def divergence(p: Position, q: Position) -> float:
    """Compute the KL in nats from p to q over the tokens that both list, all others as one."""
    both, mine, theirs = np.intersect1d(p[1], q[1], assume_unique=True, return_indices=True)
    a, b = p[2][mine], q[2][theirs]
    rest_a, rest_b = (max(1e-9, 1 - float(np.exp(x).sum())) for x in (a, b))
    return float((np.exp(a) * (a - b)).sum() + rest_a * np.log(rest_a / rest_b)) if len(both) else float("inf")


def compare(base: list[Position], other: list[Position]) -> dict[str, float]:
    true = np.array([[p[0], q[0]] for p, q in zip(base, other, strict=True)])
    same = [p[1][p[2].argmax()] == q[1][q[2].argmax()] for p, q in zip(base, other, strict=True)]
    return {
        "perplexity": round(float(np.exp(-true[:, 1].mean())), 4),
        "perplexity_change": round(float(np.exp((true[:, 0] - true[:, 1]).mean()) - 1), 6),
        "kl": round(float(np.mean([divergence(p, q) for p, q in zip(base, other, strict=True)])), 6),
        "mean_abs_logprob_difference": round(float(np.abs(true[:, 0] - true[:, 1]).mean()), 5),
        "same_token": round(float(np.mean(same)), 4),
    }


def along(base: list[Position], other: list[Position], scored: int) -> list[float]:
    """Return the mean KL of each run of `PAGE` scored tokens, over all windows."""
    each = np.array([divergence(p, q) for p, q in zip(base, other, strict=True)]).reshape(-1, scored)
    return [round(float(each[:, i : i + PAGE].mean()), 6) for i in range(0, scored, PAGE)]


def main() -> None:
    os.environ.update(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    )
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--kv-cache-dtypes",
        nargs="+",
        required=True,
        help="compared with auto, which is measured first: fp8 (GPU), kvbits_int8, ..",
    )
    parser.add_argument(
        "--text", default="novel", help="see kvbits.evaluate.texts; the novel that is shipped if not given"
    )
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32", help="of the model")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step (max_num_batched_tokens)")
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--hits", action="store_true", help="decode again behind prompts of the prefix cache")
    parser.add_argument("--skip-layers", nargs="*", default=[], help="--kv-cache-dtype-skip-layers of all but the base")
    parser.add_argument(
        "--engine",
        nargs="+",
        default=["{}"],
        help="""options of all engines but the base, JSON, each dtype with each of them: {"additional_config": {"kvbits": {"raw_newest": 64}}}; {scheme} in it is
        the dtype without kvbits_, as in the name of a file of `kvbits calibrate`""",
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():  # before vLLM is imported
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
        __import__("vllm_cpu").install()
    name = args.text if args.text == "novel" else Path(args.text).stem
    texts = windows(args.model, args.text, args.windows, args.context + args.scored)
    shape = {
        "model": args.model.name,
        "model_dtype": args.dtype,
        "context": args.context,
        "scored": args.scored,
        "windows": args.windows,
        "chunk": args.chunk,
    }
    reference: dict[str, list[Position]] = {}
    for dtype, text in [(BASE, "{}"), *itertools.product(args.kv_cache_dtypes, args.engine)]:
        settings = json.loads(text.replace("{scheme}", dtype.removeprefix("kvbits_")))
        options = settings.get("additional_config", {}).get("kvbits", {})
        settings |= {"kv_cache_dtype_skip_layers": args.skip_layers} if args.skip_layers and dtype != BASE else {}
        measured = measure(args, dtype, texts, settings)
        reference = reference or measured
        rows = []
        for phase, found in measured.items():
            base = reference["prefill" if dtype == BASE else "decode" if phase == "hit" else phase]
            said = [*args.skip_layers, *(f"{name}={x}" for name, x in options.items() if name != "calibration")]
            label = dtype + "".join(f"+{x}" for x in said if dtype != BASE)
            rows.append(
                {"kv_cache_dtype": label, "phase": phase}
                | shape
                | {"text": name, "tokens": len(found)}
                | compare(base, found)
                | ({"kl_along": along(base, found, args.scored)} if args.hits else {})
            )
        append(rows, args.out)


if __name__ == "__main__":
    main()
