"""OpenVINO's u8 and u4 caches and kvbits' on one text, one thread: KL and speed of decoding, in one run.

    pip install optimum-intel openvino openvino-tokenizers     (an environment of its own: it wants an older Transformers)
    optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp32 FOLDER
    pip install openvino                                       (beside kvbits)
    python benchmarks/bench_openvino_cpu.py MODEL FOLDER --schemes int8_centered,klt4,klt3

OpenVINO's cache is the paged one of OpenVINO GenAI, with the block size and the layouts of the CPU plugin. Its Python
pipeline returns no logits, so the same transformation and the same operator run here without the pipeline. Weights and
arithmetic are float32 on both sides.

Every cache reads the same tokens in passes of --chunk, and KL is against the float32 cache of the same runtime. The two
float32 caches are compared, too: their KL says that both runtimes run the same model. Then single tokens of the text are
decoded, the caches in turns token by token. A row has tokens a second by the process' own CPU time, which other programs
of a machine hardly change, and by the clock. Bits are all bytes that are held, over the numbers of the tokens read. The
last line is one JSON object, this run; it is added to --out (benchmarks/results/cpu/openvino.json is one).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from openvino._offline_transformations import paged_attention_transformation
from run_files import append, arguments

import kvbits
from kvbits.evaluate.caches import base_factory, factory, held_bytes
from kvbits.evaluate.calibrator import Calibrator
from kvbits.evaluate.fidelity import divergence
from kvbits.evaluate.texts import novel_start, windows
from kvbits.integrations.masks import passed
from kvbits.model_ref import ModelRef
from kvbits.ops.cpu import library

BLOCK = 32
"""Tokens of a block of the CPU plugin's paged cache."""
SAME_MODEL = 1e-4
"""Largest KL, in nats, between two float32 runtimes of one model."""


class OpenVinoCache:
    """One sequence in OpenVINO's paged cache.

    Args:
        folder: of `optimum-cli export openvino`.
        precision: "f32", "u8" or "u4".
        room: tokens.
    """

    def __init__(self, folder: Path, precision: str, room: int) -> None:
        core = openvino.Core()
        model = core.read_model(folder / "openvino_model.xml")
        paged_attention_transformation(model)
        options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": precision}
        compiled = core.compile_model(model, "CPU", options)
        self.request, self.held, self.nbytes, blocks = compiled.create_infer_request(), 0, 0, -(-room // BLOCK)
        for entry in compiled.inputs:
            if "_cache." in entry.get_any_name():
                shape = [n.get_length() if n.is_static else blocks for n in entry.partial_shape]
                tensor = openvino.Tensor(entry.element_type, openvino.Shape(shape))
                self.request.set_tensor(entry, tensor)
                self.nbytes += tensor.byte_size

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocabulary] after the next tokens `ids` [T]."""
        before, self.held = self.held, self.held + len(ids)
        blocks = -(-self.held // BLOCK)
        given = {
            "input_ids": ids.numpy(),
            "position_ids": np.arange(before, self.held, dtype=np.int64),
            "past_lens": np.array([before], np.int32),
            "subsequence_begins": np.array([0, len(ids)], np.int32),
            "block_indices": np.arange(blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "max_context_len": np.array(self.held, np.int32),
        }
        for name, value in given.items():
            self.request.set_tensor(name, openvino.Tensor(value))
        self.request.infer()
        return torch.from_numpy(self.request.get_tensor("logits").data.copy()).view(len(ids), -1)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="folder or name, as kvbits takes it")
    parser.add_argument("folder", type=Path, help="the same model, exported for OpenVINO")
    parser.add_argument("--schemes", default="int8_centered,klt4,klt3")
    parser.add_argument("--length", type=int, default=1024, help="tokens that are read")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a pass")
    parser.add_argument("--tokens", type=int, default=24, help="tokens that are decoded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvbits.load_model(args.model, dtype="float32")
    calibrator = Calibrator(model, tokenizer, None, tests=(novel_start(),))
    ids = windows(tokenizer, novel_start(), count=1, length=args.length + args.tokens)[0]
    feeds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    caches: dict[str, Any] = {}

    def of_torch(cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def feed(some: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = model(some[None], **passed(model, cache), use_cache=True).logits[0]
            return logits

        return feed

    for f in [base_factory(model), *(factory(model, name, calibration=calibrator) for name in args.schemes.split(","))]:
        caches[f.name] = f.make(1, len(ids))
        feeds[f.name] = of_torch(caches[f.name])
    for precision in ("f32", "u8", "u4"):
        caches[f"openvino {precision}"] = cache = OpenVinoCache(args.folder, precision, len(ids))
        feeds[f"openvino {precision}"] = cache.feed
    lossless = {name: "openvino f32" if name.startswith("openvino") else next(iter(caches)) for name in caches}
    lossless["openvino f32"] = next(iter(caches))
    kl: dict[str, list[torch.Tensor]] = {name: [] for name in caches}
    same: dict[str, list[torch.Tensor]] = {name: [] for name in caches}
    with torch.no_grad():
        for some in ids[: args.length].split(args.chunk):
            log_p = {name: torch.log_softmax(feed(some).double(), -1) for name, feed in feeds.items()}
            for name, base in lossless.items():
                kl[name].append(divergence(log_p[name], log_p[base], log_p[base].exp()))
                same[name].append(log_p[name].argmax(-1) == log_p[base].argmax(-1))
        between = float(torch.cat(kl["openvino f32"]).mean())
        assert between < SAME_MODEL, f"the two runtimes differ by {between} nats in float32: not the same model"
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
        for token in ids[args.length :].split(1):
            for name, feed in feeds.items():
                began = time.process_time(), time.perf_counter()
                feed(token)
                seconds[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    held = {name: cache.nbytes if name.startswith("openvino") else held_bytes(cache) for name, cache in caches.items()}
    numbers = len(ids) * sum(g.num_kv_heads * (g.head_dim + g.value_head_dim) for g in ModelRef.of(model).layers)
    rows = []
    for name, base in lossless.items():
        cpu, clock = zip(*seconds[name], strict=True)
        values = torch.cat(kl[name])
        beside = [b[0] / s for b, s in zip(seconds[base], cpu, strict=True)]
        row = {
            "model": Path(args.model).name,
            "length": args.length,
            "cache": name,
            "against": base,
            "bits_held": 8 * held[name] / numbers,
            "kl_mean": float(values.mean()),
            "kl_median": float(values.median()),
            "kl_max": float(values.max()),
            "top1_agreement": float(torch.cat(same[name]).double().mean()),
            "tokens_per_cpu_s": 1 / statistics.median(cpu),
            "tokens_per_s": 1 / statistics.median(clock),
            "ratio_of_cpu_s": statistics.median(beside),
        }
        rows.append(row)
        print(
            f"{name:16} {row['bits_held']:6.2f} bits  KL {row['kl_mean']:.6f} (median {row['kl_median']:.6f}, worst"
            f" {row['kl_max']:.3f}) same token {row['top1_agreement']:.2%}  {row['tokens_per_cpu_s']:6.2f} tokens a CPU"
            f" second ({row['ratio_of_cpu_s']:.2f}x {base}), {row['tokens_per_s']:.2f} by the clock",
            flush=True,
        )
    append(rows, args.out, threads=1, tier=library.tier(), openvino=openvino.__version__)


main()
