"""Decoding in a CUDA graph, without a compiler: the model's forward pass for one token is captured once and replayed,
so a token costs what its kernels cost.

    cache = KVCache.for_model(model, "int8_centered", batch_size=1, max_tokens=8192)
    with graphed(model, cache):
        model.generate(**inputs, past_key_values=cache)

Inside, `model.forward` is replaced. A pass of one token per sequence with this cache is replayed; prompts, chunks, and
calls with other caches go the usual way. The first token after anything else runs eagerly, which moves decoding to the
device (`cache/device_decode`); the second is captured. What a replay needs of the caller's tensors is copied into
buffers that the graph reads; lengths, pages and what closes are the device's own. Whatever takes the pages back from
the device (a prompt, `crop`, `reset`, `pages.seq_lens`) voids the graph: the next tokens capture another.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..cache import explain
from ..cache.device_decode import DeviceDecode
from ..errors import CacheStateError, DataError, KvbitsError, UnsupportedError, counted
from ..geometry import layer_places
from ..ops import decode
from .masks import CACHE_NAMES, NAME, HoldsPages, cache_among, is_ours, passed
from .placement import require_loaded

BUFFERED = ("input_ids", "inputs_embeds", "position_ids", "cache_position", "token_type_ids")
"""Tensor arguments that have the same shape for every token; the mask grows and is treated apart."""
BACKEND = "inductor"
EAGER_TOKENS = 3
"""Tokens in a row that may run eagerly before the user is told why."""


class NotCapturedError(UnsupportedError):
    """A pass of one token that runs eagerly but not in a graph; nothing was launched, and the cache is as it was."""


@contextmanager
def graphed(model: Any, cache: HoldsPages, *, compile: bool = False) -> Iterator[GraphDecoder]:
    """Let `model` decode with `cache` in a CUDA graph, in a with block. It serves `generate` (greedy, sampling,
    streamers, left-padded batches) and calls with one token.

    Beam search and assisted generation move pages between tokens, so they run eagerly, with a warning. Hooks on the
    model's parts do not run in replays. The yielded decoder counts `replays` and `captures`.

    Args:
        model: the Transformers model that `cache` was made for, in its final dtype and place; its weights stay where
            they are inside.
        cache: of fixed capacity (`KVCache.for_model(model, scheme, batch_size=.., max_tokens=..)`).
        compile: have torch.compile fuse the model's many small kernels before they are captured. Logits are then those
            of compiled code, which rounds less often than the model's own: other last bits, and now and then another
            token. Compiling takes half a minute for 32 layers, once per batch size.

    Raises:
        UnsupportedError: no GPU, a cache that grows, a scheme whose tokens are run by the host, a compiled model, or
            one spread over devices.
        DataError: a cache of another dtype, place or geometry than the model's.
    """
    decoder = GraphDecoder(model, cache, compile)
    try:
        with decoder.leading(model):
            yield decoder
    finally:
        decoder.forget()


def leads(model: Any, cache: HoldsPages) -> bool:
    """Return whether `model` is inside `graphed` with this cache."""
    forward = model.__dict__.get("forward")
    while (decoder := getattr(forward, "decoder", None)) is not None:
        if decoder.cache is cache:
            return True
        forward = decoder.eager
    return False


def is_compiled(model: Any) -> bool:
    """Return whether `model` or its forward pass was given to torch.compile."""
    return (
        hasattr(model, "_orig_mod")
        or getattr(model, "_compiled_call_impl", None) is not None
        or hasattr(model.forward, "_torchdynamo_orig_callable")
    )


class GraphDecoder:
    """The forward pass of a model whose single tokens are replayed. Made by `graphed`.

    Attributes:
        cache: whose tokens they are.
        replays, captures: passes that were replayed, and graphs made for them.
    """

    def __init__(self, model: Any, cache: HoldsPages, compile: bool = False) -> None:
        _check(model, cache)
        self._name, self.cache, self._pages = type(model).__name__, cache, cache.pages
        self._weight = next(model.parameters())
        self._placed = self._weight.data_ptr()
        self.eager: Callable[..., Any] = model.forward
        self._compiled = torch.compile(self.eager, backend=BACKEND, fullgraph=True, dynamic=False) if compile else None
        self._signature, self._own = inspect.signature(self.eager), passed(model, cache)
        self._captured: _Captured | None = None
        self._fresh = True  # anything but a token came before
        self._eager_tokens = 0
        self._told: set[str | None] = set()
        self.replays = self.captures = 0

    @contextmanager
    def leading(self, model: Any) -> Iterator[None]:
        """Make this `model.forward` inside."""

        @functools.wraps(self.eager)  # generate() reads its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        forward.decoder = self  # type: ignore[attr-defined]
        replaced = model.__dict__.get("forward")  # accelerate's hooks live there
        model.forward = forward
        try:
            yield
        finally:
            if replaced is None:
                del model.forward
            else:
                model.forward = replaced

    def forget(self) -> None:
        """Let go of the graph and its memory."""
        self._captured = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, replayed where it is one token per sequence with this cache; its usual output,
        in tensors of its own.

        Raises:
            CacheStateError: another number of sequences than the cache holds.
            DataError: inputs of another dtype or on another device; weights that were moved or cast.
            PoolFullError: the capacity is used up.
            UnsupportedError: arguments that a captured pass cannot take; a forward pass that cannot be captured.
            In all cases before anything is launched, and the cache is as it was.
        """
        if args:
            kwargs = {**self._signature.bind_partial(*args).arguments, **kwargs}
        if cache_among(kwargs) is not self.cache:
            return self.eager(**kwargs)
        tokens = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
        if tokens is None:
            raise DataError("pass input_ids or inputs_embeds")
        self._check_tokens(tokens)
        if tokens.shape[1] != 1:
            self._fresh = True
            return self._run_eagerly(kwargs)
        decoding = self._pages.decoding
        if decoding is None or not decoding.steps_left:
            return self._token_eagerly(kwargs)
        return self._replay(kwargs, decoding)

    def _check_tokens(self, tokens: torch.Tensor) -> None:
        pages, weight = self._pages, self._weight
        if pages.batch_size and tokens.shape[0] != pages.batch_size:
            raise CacheStateError(
                f"the cache holds {counted(pages.batch_size, 'sequence')} but was given {tokens.shape[0]}; "
                f"{explain.other_batch(pages.batch_size, tokens.shape[0])}"
            )
        if tokens.device != weight.device:
            raise DataError(f"inputs on {tokens.device} for a model on {weight.device}; move them there")
        if tokens.is_floating_point() and tokens.dtype != weight.dtype:
            raise DataError(f"inputs_embeds are {tokens.dtype}, the model {weight.dtype}; cast them")
        if weight.data_ptr() != self._placed:
            raise DataError(
                "the model's weights were moved or cast inside graphed(), where a graph reads them at their old place;"
                " do that before it"
            )

    def _run_eagerly(self, kwargs: dict[str, Any]) -> Any:
        try:
            with torch.no_grad():  # as in a graph
                return self.eager(**kwargs)
        except BaseException:
            if self._pages.in_pass:
                self.cache.abandon()
            raise

    def _token_eagerly(self, kwargs: dict[str, Any]) -> Any:
        """Run a token that decoding on the device begins with, or one that the host must lead."""
        if self._fresh:
            self._pages.expect_tokens()
        self._fresh = False
        out = self._run_eagerly(kwargs)
        self._eager_tokens = 0 if self._pages.decoding is not None else self._eager_tokens + 1
        why = self._pages.led_by_host
        if self._eager_tokens >= EAGER_TOKENS and why not in self._told:
            self._told.add(why)
            warnings.warn(
                f"tokens run eagerly for now, in no graph: {why or 'something touches the cache between tokens'}",
                RuntimeWarning,
                stacklevel=2,
            )
        return out

    def _replay(self, kwargs: dict[str, Any], decoding: DeviceDecode) -> Any:
        columns = self.cache.columns
        kwargs, tensors, mask = _split(kwargs, self.cache.get_seq_length(), self._weight.device)
        known = None if mask is None else columns.known(mask, 1)
        key = (
            *((name, x.shape, x.dtype) for name, x in tensors.items()),
            mask is None,
            *sorted(kwargs.items(), key=lambda x: x[0]),
        )
        captured = self._captured
        if captured is None or captured.decoding is not decoding or captured.key != key:
            self._captured = None  # its memory serves the next
            captured = _Captured(decoding, key, tensors, known)
        captured.fill(tensors, known)
        if self._captured is None:
            captured.graph = self._capture(kwargs | captured.inputs)
            self._captured = captured
        self._pages.count_replays(1)
        captured.graph.replay()
        columns.replayed(known)
        self.replays += 1
        self._fresh, self._eager_tokens = False, 0
        return _copy(captured.graph.output)

    def _capture(self, inputs: dict[str, Any]) -> CapturedWork:
        device, columns = self._weight.device, self.cache.columns
        if torch.is_autocast_enabled(device.type):
            raise NotCapturedError(
                "graphed() under torch.autocast, which keeps casts that a graph cannot see; load the model in the dtype"
                " it should run in"
            )

        def work() -> Any:
            columns.captured = True
            try:
                with torch.no_grad():
                    return (self._compiled or self.eager)(**inputs, **self._own)
            finally:
                columns.captured = False

        try:
            if self._compiled is not None:
                self._rehearse(inputs)
            graph = CapturedWork(work, device)
        except BaseException as error:
            self._pages.abandon()
            if not isinstance(error, RuntimeError) or isinstance(error, KvbitsError):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise NotCapturedError(
                f"the forward pass of {self._name} for one token cannot be captured in a CUDA graph ({reason}); decode"
                " without one"
            ) from error
        self.captures += 1
        return graph

    def _rehearse(self, inputs: dict[str, Any]) -> None:
        """Compile the pass, which cannot be done while it is captured: run it without attention, so that nothing is
        stored.
        """
        columns = self.cache.columns
        if inputs["attention_mask"] is not None:
            torch._dynamo.maybe_mark_dynamic(inputs["attention_mask"], 1)
        columns.captured = columns.rehearsed = True
        try:
            with torch.no_grad():
                self._compiled(**inputs, **self._own)  # type: ignore[misc]
        finally:
            columns.captured = columns.rehearsed = False


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


class CapturedWork:
    """Launches of `work`, captured in a CUDA graph to be launched again.

    Attributes:
        output: what `work` returned; every replay writes it anew.
    """

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # set again: torch.cuda.graph leaves its own stream set when capturing fails
        caller = torch.cuda.stream(torch.cuda.current_stream(device))
        # other threads may use the GPU meanwhile
        captured = torch.cuda.graph(self._graph, stream=_capture_stream(device), capture_error_mode="thread_local")
        with caller, captured:
            self.output = work()

    def replay(self) -> None:
        self._graph.replay()


class _Captured:
    """A captured pass and the tensors it reads.

    Attributes:
        decoding: what the device held when it was captured.
        key: the arguments it was captured with.
        inputs: what tensor arguments are copied into; of `attention_mask`, bool [B, positions], only the last column is
            read.
    """

    graph: CapturedWork

    def __init__(
        self, decoding: DeviceDecode, key: tuple[Any, ...], tensors: dict[str, torch.Tensor], known: torch.Tensor | None
    ) -> None:
        self.decoding, self.key = decoding, key
        with torch.inference_mode(False):
            self.inputs: dict[str, torch.Tensor | None] = {
                name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in tensors.items()
            }
            self._mask = self.inputs["attention_mask"] = (
                None if known is None else torch.ones(known.shape, dtype=torch.bool, device=known.device)
            )

    def fill(self, tensors: dict[str, torch.Tensor], known: torch.Tensor | None) -> None:
        for name, x in tensors.items():
            self.inputs[name].copy_(x)  # type: ignore[union-attr]
        if self._mask is not None and known is not None:
            self._mask[:, -1].copy_(known[:, -1])


def _split(
    kwargs: dict[str, Any], seen: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor | None]:
    """Return (other arguments, tensors of fixed shape, bool mask [B, at least seen + 1] or None) of a pass of one
    token.
    """
    kwargs = {name: x for name, x in kwargs.items() if name not in CACHE_NAMES}
    mask = kwargs.pop("attention_mask", None)
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            what = type(mask).__name__ if not isinstance(mask, torch.Tensor) else f"of shape {tuple(mask.shape)}"
            raise UnsupportedError(
                f"graphed() needs the 2D padding mask (attention_mask of shape [batch, tokens]), not one {what}"
            )
        mask = mask.to(device=device, dtype=torch.bool)
    tensors = {name: kwargs.pop(name) for name in BUFFERED if isinstance(kwargs.get(name), torch.Tensor)}
    if "position_ids" not in tensors:
        tensors["position_ids"] = torch.full((1, 1), seen, device=device)
    for name, x in kwargs.items():
        if isinstance(x, torch.Tensor) or not isinstance(x, (bool, int, float, str, type(None))):
            raise NotCapturedError(
                f"graphed() does not know what {name}={type(x).__name__} is for in a pass of one token; call the model"
                " outside of it"
            )
    return kwargs, tensors, mask


def _copy(x: Any) -> Any:
    """Return an output whose tensors no replay writes."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, ModelOutput):
        return type(x)(**{name: _copy(value) for name, value in x.items()})
    return tuple(map(_copy, x)) if isinstance(x, tuple) else x


def _check(model: Any, cache: HoldsPages) -> None:
    """Refuse what can never be captured, before anything runs."""
    require_loaded(model)
    if not is_ours(cache):
        raise DataError(
            f"graphed() needs the KVCache that the model decodes with, not {type(cache).__name__};"
            " KVCache.for_model(model, ..) makes one"
        )
    if is_compiled(model):
        raise UnsupportedError(
            "graphed() takes the model itself, not what torch.compile made of it; a graph needs no compiler"
        )
    pages, config = cache.pages, model.config.get_text_config(decoder=True)
    if not decode.leads(pages.device):
        raise UnsupportedError(
            f"graphed() is for NVIDIA GPUs, but the cache is on {pages.device}; leave it out there: the same calls run"
            " without it"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or any(d.type == "meta" for d in devices):
        raise NotCapturedError(
            f"the model is spread over {', '.join(sorted(map(str, devices)))} (meta: its weights are brought to the GPU"
            " in each pass); a graph holds the work of one GPU: load it on one"
        )
    if devices.pop().type != pages.device.type:
        raise DataError(
            f"the model is on {model.device}, the cache on {pages.device}; build the cache again with KVCache.for_model"
        )
    if pages.max_tokens is None:
        raise UnsupportedError(
            "a cache that grows is assigned pages by the host again and again; build it with max_tokens (and"
            " batch_size) for graphed()"
        )
    if config._attn_implementation != NAME:
        raise UnsupportedError(
            f"the model's attention implementation is {config._attn_implementation!r}; call"
            f" model.set_attn_implementation({NAME!r})"
        )
    if str(model.dtype) != f"torch.{pages.spec.raw_dtype}":
        raise DataError(
            f"the model is {model.dtype}, but the cache was built for {pages.spec.raw_dtype}; build the cache again"
            " with KVCache.for_model"
        )
    if len(cache.layers) != (count := len(layer_places(config))):
        raise DataError(
            f"the cache has {len(cache.layers)} layers, the model {count}; build it with KVCache.for_model(model, ..)"
        )
    if why := pages.cannot_decode_on_device(config.num_attention_heads, model.dtype):
        raise UnsupportedError(
            f"scheme {pages.spec.scheme.name!r} is not decoded on the device, which a graph needs: {why}; decode"
            " without graphed()"
        )
    if not {"position_ids", "kwargs"} & set(inspect.signature(model.forward).parameters):
        raise NotCapturedError(
            f"the forward pass of {type(model).__name__} takes no position_ids, so positions would be captured; decode"
            " without graphed()"
        )
