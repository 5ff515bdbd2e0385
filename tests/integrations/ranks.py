"""Program of each rank of test_tensor_parallel.py: a model spread over the ranks against the same model whole.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DistributedConfig

from kvbits import schemes
from kvbits.calibrate.calibration import Calibration, fingerprint
from kvbits.errors import KvbitsError
from kvbits.integrations.huggingface import KVCache
from kvbits.integrations.identity import identity
from kvbits.spec import PerChannel, QuantSpec


def prompts() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 90, (2, 150), generator=torch.Generator().manual_seed(1), device="cpu").to(
        torch.get_default_device()
    )
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokens(model, cache, inputs, count=24):
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=count, do_sample=False).tolist()


def calibrated(config):
    spec = QuantSpec(granularity=PerChannel(), static=True)
    scheme = schemes.get("int8", key=spec, value=spec)
    g = torch.Generator().manual_seed(2)
    static = [
        {
            f"{kind}_scale": (
                torch.rand(config.num_key_value_heads, config.head_dim, generator=g, device="cpu") / 20 + 0.01
            )
            for kind in "kv"
        }
        for _ in range(config.num_hidden_layers)
    ]
    return scheme, Calibration(static, fingerprint(config, scheme))


def refusal(do) -> str:
    try:
        do()
    except KvbitsError as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, object]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device).eval()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto", tp_size=size)
    ).eval()
    inputs, found = prompts(), {"fingerprints": identity(model) == identity(whole)}
    static, calibration = calibrated(model.config)
    for name, scheme, options in (
        ("raw", "raw", {}),
        ("int8", "int8", {}),
        ("fixed", "int4", {"batch_size": 2, "max_tokens": 300}),
        ("static", static, {"calibration": calibration}),
    ):
        caches = [KVCache.for_model(m, scheme, **options) for m in (whole, model)]
        found[name] = [tokens(m, c, inputs) for m, c in zip((whole, model), caches, strict=True)]
        found[f"{name}_bytes"] = [c.nbytes for c in caches]
        path = folder / f"{name}_ranks.kvbits"
        caches[1].save(path)
        if rank == 0:
            caches[0].save(folder / f"{name}_one.kvbits")
        dist.barrier()
        longer = torch.tensor(found[name][0])
        longer = {
            "input_ids": longer,
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 24, dtype=torch.long)], 1),
        }
        found[f"{name}_loaded"] = [
            tokens(m, KVCache.load(folder / f"{name}_{by}.kvbits", m), longer, 12)
            for m in (whole, model)
            for by in ("one", "ranks")
        ]
        one, ranks = (KVCache.load(folder / f"{name}_{by}.kvbits", whole).pages for by in ("one", "ranks"))
        found[f"{name}_same"] = (
            one.seq_lens == ranks.seq_lens
            and one.built_for == ranks.built_for
            and max(
                float((a - b).norm() / b.norm())
                for layer in range(2)
                for row in range(2)
                for a, b in zip(one.dequantize(layer, row), ranks.dequantize(layer, row), strict=True)
            )
            < 1e-3
        )
    found["prefix"] = refusal(lambda: KVCache.from_prefix(model, inputs["input_ids"][:1], store=None))
    found["nowhere"] = refusal(lambda: KVCache.for_model(model, "raw").save(folder / "no" / "such" / "file"))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main(Path(sys.argv[1]))
    Path(sys.argv[1], f"found{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # a rank that leaves early takes the other's connections away
    dist.destroy_process_group()
