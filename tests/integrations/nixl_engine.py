"""A vLLM engine on a CPU for test_vllm_transfer.py: computes a prompt, says where its blocks are, and keeps them until
its input ends; or takes those of another.

python nixl_engine.py MODEL DTYPE [TRANSFER]
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from typing import Any

TOKENS = 300
FULL_BLOCKS = 4
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def nixl(name: str) -> Any:
    """The connector, on a port that is free now."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(one.getsockname()[1])
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu", engine_id=name)


def answer(llm: Any, prompt: list[int], max_tokens: int, transfer: dict[str, Any]) -> Any:
    """vLLM's output for a prompt whose blocks are to be kept, or are elsewhere."""
    from vllm import SamplingParams

    asked = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        extra_args={"kv_transfer_params": transfer},
    )
    return llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0]


def digests(llm: Any, block_ids: list[int]) -> list[str]:
    """Return digests of the bytes of some blocks, per layer."""

    def of(worker: Any) -> list[str]:
        return [
            hashlib.sha256(x[block_ids].contiguous().view(-1).numpy().tobytes()).hexdigest()
            for x in worker.model_runner.kv_caches
        ]

    return llm.collective_rpc(of)[0]


def main(path: str, dtype: str, transfer: str | None = None) -> None:
    from integrations import vllm_cpu

    from kvbits.ops import dispatch

    vllm_cpu.install()
    dispatch.BACKENDS["attend"] = ("reference",)
    from integrations.judged import random_ids

    llm = vllm_cpu.engine(path, dtype, kv_transfer_config=nixl("sender" if transfer is None else "other"))
    if transfer is not None:
        got = answer(llm, random_ids(TOKENS), 4, json.loads(transfer)).outputs[0]
        print("ENGINE " + json.dumps([got.finish_reason, list(got.token_ids)]), flush=True)
        os._exit(0)
    found = answer(llm, random_ids(TOKENS), 1, ASKED).kv_transfer_params
    blocks = found["remote_block_ids"][0][:FULL_BLOCKS]
    print("ENGINE " + json.dumps({"transfer": found, "digests": digests(llm, blocks)}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
