"""A calibration made by the engine itself: for models that no single process holds (ranks, quantized weights), and for
those that Transformers does not run.

The engine runs with raw pages of this plugin's backend (`"observe": true`), whose layers sum up what
`calibrate.moments` needs of the queries and keys that they are given. After the text has been prefilled each worker
writes its heads' sums to a file, and the caller makes bases of them.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ... import schemes
from ...calibrate.calibration import Calibration, fingerprint, read_file, write_file
from ...calibrate.moments import OF_HEADS, Moments, warn_of
from ...errors import CalibrationError
from ...spec import LayerGeometry, QuantSpec
from ..rotary import layers_of
from . import releases

KEY = schemes.get("klt4").key
"""Keys whose basis is wanted: its directions are those of all widths."""


def moments(vllm_config: Any, index: int, num_kv_heads: int) -> Moments:
    """Make the `Moments` of a layer of the whole model, for the kv heads of this rank."""
    layer = layers_of(vllm_config.model_config.hf_text_config)[index]
    return Moments(KEY, dataclasses.replace(layer, num_kv_heads=num_kv_heads), f"layer {index}")


class Worker:
    """Methods that a worker of vLLM has besides its own (`worker_extension_cls`)."""

    vllm_config: Any

    def kvbits_forget(self) -> None:
        """Drop what warming up has shown."""
        for impl in self._observing():
            impl.moments = moments(self.vllm_config, impl.index, impl.num_kv_heads)

    def kvbits_write(self, folder: str) -> None:
        """Write the sums of this rank's layers, each to a file."""
        from vllm.distributed import get_tensor_model_parallel_rank

        for impl in self._observing():
            tensors = {name: x.contiguous() for name, x in impl.moments.state().items()}
            write_file(Path(folder) / f"{impl.index}-{get_tensor_model_parallel_rank():04}", tensors, {})

    def _observing(self) -> list[Any]:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return [layer.impl for layer in layers if getattr(getattr(layer, "impl", None), "moments", None) is not None]


def calibrate(model: str, prompts: Sequence[Sequence[int]], options: dict[str, Any]) -> Calibration:
    """Return a calibration for klt presets of the model that vLLM runs.

    Args:
        prompts: token ids; each is one text that begins at position 0.
        options: of `vllm.LLM`, such as `{"tensor_parallel_size": 4, "quantization": "fp8"}`.

    Raises:
        CalibrationError: layers that this plugin's backend does not see.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    given = {
        "enforce_eager": True,
        "block_size": 64,
        "max_model_len": max(map(len, prompts)) + 1,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.9,
    } | options
    llm = LLM(
        model=model,
        attention_backend=releases.backend().name,
        enable_prefix_caching=False,
        worker_extension_cls=f"{__name__}.Worker",
        additional_config={"kvbits": {"observe": True}},
        **given,
    )
    llm.collective_rpc("kvbits_forget")
    llm.generate(
        [{"prompt_token_ids": list(p)} for p in prompts],
        SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False),
    )
    config = llm.llm_engine.vllm_config.model_config.hf_text_config
    layers = layers_of(config)
    with tempfile.TemporaryDirectory() as folder:
        llm.collective_rpc("kvbits_write", args=(folder,))
        parts = [[read_file(x)[1] for x in sorted(Path(folder).glob(f"{i}-*"))] for i in range(len(layers))]
    scheme = schemes.for_layers("klt4", layers)
    static, weak = [], list[str]()
    for i, (layer, seen) in enumerate(zip(layers, parts, strict=True)):
        if not seen:
            raise CalibrationError(
                f"layer {i} of {model} is not attended by kvbits' backend; this model cannot be calibrated"
            )
        found = whole(scheme.for_layer(i, len(layers))[0], layer, seen, f"layer {i}")
        static.append({"k_basis": found.basis(), "k_mean": found.mean()})
        weak += found.weak
    warn_of(weak, stacklevel=2)
    tokens = sum(map(len, prompts))
    return Calibration(
        static,
        fingerprint(config, scheme),
        {"scheme": scheme.name, "model": model, "prompts": len(prompts), "tokens": tokens, "engine": "vllm"},
    )


def whole(key: QuantSpec, layer: LayerGeometry, parts: list[dict[str, torch.Tensor]], what: str) -> Moments:
    """Return the moments of a layer from those of its ranks in order.

    Where ranks share a kv head, each has seen some of its queries and all of its keys.
    """
    found = Moments(key, layer, what)
    sharing = max(1, len(parts) * len(parts[0]["keys"]) // layer.num_kv_heads)
    groups = [parts[i : i + sharing] for i in range(0, len(parts), sharing)]
    heads = {name: torch.cat([group[0][name] for group in groups]) for name in OF_HEADS}
    queries = torch.cat([torch.stack([part["queries"] for part in group]).sum(0) for group in groups])
    found.load(heads | {"queries": queries, "counts": parts[0]["counts"], "texts": parts[0]["texts"]})
    return found
