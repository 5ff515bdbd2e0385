"""Seconds that `kvbits.identity` takes for a model of an 8B Llama's shape: the first call, and one that finds the
weights unchanged.

    python benchmarks/bench_identity.py --device cuda --out benchmarks/results/local/identity.json

Weights are random numbers in bfloat16. The run checks that an edit of one number changes the identity and that taking
it back restores it. `--layers` makes a smaller model, for a CPU.
"""

from __future__ import annotations

import time

import torch
import transformers
from run_files import append, arguments

import kvbits

parser = arguments(__doc__)
parser.add_argument("--device", default="cpu")
parser.add_argument("--layers", type=int, default=32)


def seconds(model: torch.nn.Module) -> tuple[float, str]:
    """Return the seconds of one call of `kvbits.identity`, and its result."""
    start = time.perf_counter()
    found = kvbits.identity(model)
    return time.perf_counter() - start, found


def main() -> None:
    """Measure, check and print one JSON line."""
    args = parser.parse_args()
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    weight = model.model.layers[-1].self_attn.v_proj.weight
    if args.device != "cpu":
        torch.cuda.synchronize()
    first, name = seconds(model)
    again, same = seconds(model)
    with torch.no_grad():
        was = weight[17, 5].clone()
        weight[17, 5] += 1
        edited, other = seconds(model)
        weight[17, 5] = was
    _, back = seconds(model)
    if not name == same == back != other:
        raise SystemExit("identity missed an edit, or differs for equal weights")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    row = {"device": args.device, "bytes": nbytes, "first_s": first, "again_s": again, "edited_s": edited}
    append([row], args.out)


if __name__ == "__main__":
    main()
