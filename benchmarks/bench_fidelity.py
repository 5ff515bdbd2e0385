"""Accuracy of presets against the 16-bit cache: perplexity, KL, top-1 over windows of a text, through the real packed cache.

    python benchmarks/bench_fidelity.py MODEL --text wiki.test.raw --windows 16 --length 1024 --chunk 64

Bytes are held by a cache of exactly one window. Prints a table and writes JSON beside the other results; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache

import kvbits
from kvbits.evaluate.fidelity import compare_windows
from kvbits.progress import bar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--text", type=Path, required=True, help="UTF-8 text file; WikiText files are joined the usual way")
parser.add_argument("--schemes", default=",".join(n for n in kvbits.schemes.PRESETS if not kvbits.schemes.PRESETS[n].needs_calibration))
parser.add_argument("--windows", type=int, default=16)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--chunk", type=int, default=64)
parser.add_argument("--dtype", default="auto")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--out", type=Path, help="JSON file (default benchmarks/results/fidelity/MODEL.json)")
args = parser.parse_args()

torch.set_num_threads(args.threads)
model, tokenizer = kvbits.load_model(args.model, dtype=args.dtype)
raw = args.text.read_text(encoding="utf-8")
if args.text.name.startswith("wiki"):
    raw = "\n\n".join((line + "\n") if line.strip() else "" for line in raw.split("\n")[:-1])
ids = tokenizer(raw[: 12 * args.windows * args.length], return_tensors="pt").input_ids[0]
names = args.schemes.split(",")


def fresh() -> dict:
    ours = {n: kvbits.KVCache.for_model(model, n, batch_size=1, max_tokens=args.length) for n in names}
    return {"16-bit": DynamicCache(config=model.config)} | ours


began = time.time()
with bar("windows", args.windows * args.length) as advance:
    results = compare_windows(model, fresh, ids, windows=args.windows, length=args.length, chunk=args.chunk, on_tokens=advance)
base = results["16-bit"]
rows = []
for name, cache in fresh().items():
    f = results[name]
    row = {"scheme": name, "ppl": f.perplexity, "ppl_change": f.perplexity / base.perplexity - 1, "kl_mean": f.kl_mean, "kl_p99": f.kl_p99}
    row |= {"tvd_mean": f.tvd_mean, "top1_agreement": f.top1_agreement, "num_tokens": f.num_tokens, "seconds": f.seconds}
    if name != "16-bit":
        spec = cache.store.spec
        row |= {"bytes_measured": cache.nbytes, "bytes_predicted": spec.nbytes(args.length), "bits_per_element": spec.bits_per_element}
    rows.append(row)
    print(f"{name:18} ppl {row['ppl']:9.4f} {row['ppl_change']:+8.2%}  KL {row['kl_mean']:.5f} p99 {row['kl_p99']:.4f}  TVD {row['tvd_mean']:.4f}  top-1 {row['top1_agreement']:.2%}")
report = {
    "model": Path(args.model).name, "text": args.text.name, "windows": args.windows, "length": args.length, "chunk": args.chunk, "dtype": str(model.dtype),
    "cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "transformers": transformers.__version__, "kvbits": kvbits.__version__,
    "threads": args.threads, "seconds": time.time() - began, "rows": rows,
}  # fmt: skip
out = args.out or Path(__file__).parent / "results" / "fidelity" / f"{report['model']}.json"
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps(report, indent=1) + "\n")
print(json.dumps(report))
