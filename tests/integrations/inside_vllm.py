"""Imports of tests inside vLLM on a CPU: without vLLM, a test module that imports this one is skipped.

Fixtures are in conftest.py.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("msgspec") is None:
    pytest.skip("vLLM is not installed (tests/integrations/run_vllm_cpu.sh sets it up)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("these tests run vLLM on a CPU", allow_module_level=True)

from integrations import vllm_cpu

vllm_cpu.install()


def generate(llm, prompts, max_tokens=16):
    """(tokens, their log-probabilities, cached prompt tokens) of each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [read(o) for o in outputs]


def read(output):
    tokens = list(output.outputs[0].token_ids)
    return (
        tokens,
        torch.tensor([d[t].logprob for d, t in zip(output.outputs[0].logprobs, tokens, strict=True)]),
        output.num_cached_tokens,
    )


def said(calibration, **options):
    """Options of an engine that is given a calibration."""
    return {"additional_config": {"kvbits": {"calibration": calibration.path, **options}}}
