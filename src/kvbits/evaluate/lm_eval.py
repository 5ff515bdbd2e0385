"""The cache inside lm-eval (EleutherAI's lm-evaluation-harness): its Transformers backend with one more argument.

    python -m kvbits.evaluate.lm_eval run --model kvbits --model_args pretrained=Qwen/Qwen2.5-0.5B-Instruct,scheme=kivi4
    --tasks arc_challenge

is lm-eval's own command line, which finds no models of other packages by itself (0.4.13 has no entry point for them):
this module registers "kvbits" and calls that command line. From Python, importing it registers the model too:

    from kvbits.evaluate.lm_eval import KvbitsLM
    lm_eval.simple_evaluate(model=KvbitsLM(pretrained="Qwen/Qwen2.5-0.5B-Instruct", scheme="kivi4"),
    tasks=["arc_challenge"])

lm-eval scores a continuation in one forward pass without a cache; here prompt and continuation go through a fresh cache
in chunks, so that what is scored has read its prompt as stored. Needs `pip install lm-eval`.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import embedded
from ..errors import SpecError, UnsupportedError
from ..integrations.masks import passed
from ..integrations.models import load_model
from ..schemes import RECOMMENDED
from .caches import CacheFactory, base_factory, factory
from .calibrator import Calibrator
from .texts import read_text

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise UnsupportedError(f"this needs lm-eval ({error}); run `pip install lm-eval`") from error


@register_model("kvbits")
class KvbitsLM(HFLM):
    """`HFLM` whose model reads and writes a cache of one kind.

    Args:
        pretrained: as in HFLM: a directory, a hub id, or a loaded model (then give `tokenizer` too); or "embedded" (see
            `embedded`).
        scheme: preset, stock quantized cache, or "base" for the model's own cache.
        chunk: tokens per forward pass; older history is read as stored.
        calibration_text: file for schemes that need calibration, never the benchmark's text.
        cache_factory: a factory made elsewhere, instead of `scheme`.

    Raises:
        SpecError: a batch size other than 1: lm-eval pads batches on the right, and padding would share scales with
            real tokens.
    """

    def __init__(
        self,
        pretrained: Any,
        scheme: str = RECOMMENDED,
        chunk: int = 128,
        calibration_text: str | None = None,
        cache_factory: CacheFactory | None = None,
        **kwargs: Any,
    ) -> None:
        if int(kwargs.get("batch_size") or 1) != 1:
            raise SpecError(
                f"batch_size={kwargs['batch_size']}: lm-eval pads batches on the right, which a packed cache would"
                " store; use batch_size=1"
            )
        if pretrained == embedded.NAME:
            pretrained, kwargs["tokenizer"] = load_model(pretrained)
        super().__init__(pretrained, **({"device": "cpu"} | kwargs if not torch.cuda.is_available() else kwargs))
        self.chunk = int(chunk)
        self.factory = cache_factory or self._factory(scheme, calibration_text)

    def _factory(self, scheme: str, calibration_text: str | None) -> CacheFactory:
        if scheme == "base":
            return base_factory(self.model)
        text = None if calibration_text is None else read_text(calibration_text)
        return factory(self.model, scheme, calibration=Calibrator(self.model, self.tokenizer, text))

    @torch.no_grad()
    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """Return logits [1, tokens, vocabulary] of inps [1, tokens], fed through a fresh cache in chunks."""
        cache = self.factory.make(1, inps.shape[1])
        pieces = [
            self.model(piece, **passed(self.model, cache), use_cache=True).logits
            for piece in inps.split(self.chunk, dim=1)
        ]
        return torch.cat(pieces, 1)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Generate as HFLM does, with a fresh cache and the prompt in chunks."""
        cache = self.factory.make(len(context), max_length)
        out: torch.Tensor = super()._model_generate(
            context, max_length, stop, **passed(self.model, cache), prefill_chunk_size=self.chunk, **generation_kwargs
        )
        return out


def main() -> None:
    """Run lm-eval's command line, with the model "kvbits" registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
