"""Masks that tell which tokens are padding.

This module has the mask function registered as "kvbits", and what a cache remembers of the masks it has seen.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..cache.paged_cache import PagedCache
from ..errors import UnsupportedError
from ..later import Later

LOOK_EVERY = 16
"""Tokens between two looks at what masks on a GPU said."""
_OTHER_MASK = (
    "tokens that are already cached (or shows padding that was not stored); kvbits keeps what it was told when they"
    " came; build a fresh cache for another mask"
)
NAME = "kvbits"
"""Name of the attention and mask functions in Transformers' registries."""
CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument: the first in models of Transformers 5.24 or newer, the second in older ones and in those of
others.
"""


BIDIRECTIONAL = "bidirectional attention"


class NotATensorError(UnsupportedError, AttributeError, TypeError):
    """An attribute or index of tensors, asked of an object that is not a tensor.

    Code that only asks (`hasattr`, `getattr` with a default, `try`) gets the answer that Python gives for any object.
    Code that needs a tensor gets the way out.
    """


class NotATensor:
    """An object that raises a clear error wherever code that is not ours treats it as a tensor."""

    _why: ClassVar[str]
    __iter__ = None  # or Python would take it for a sequence, for its __getitem__

    def _refuse(self) -> NoReturn:
        raise NotATensorError(self._why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def _refuse_operand(self, other: object = None) -> NoReturn:
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _refuse_operand
    __and__ = __rand__ = __or__ = __ror__ = __lt__ = __le__ = __gt__ = __ge__ = __invert__ = __neg__ = _refuse_operand

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise UnsupportedError(cls._why)  # a TypeError would be taken for NotImplemented by the operators of tensors


@dataclass(eq=False)
class Columns:
    """Positions the cache has seen, padding included: shared by the cache and its layers, which know nothing else of it
    (a cycle between them would keep pages alive until the garbage collector comes by).

    Attributes:
        pages: the cache that has seen them.
        numbers: int64 [2] on the host: the number by which `numbered` finds this, and `seen`. All that compiled code is
            given of a cache, so that nothing which changes is a Python number to it.
        new, been: positions of the pass under way, and the layers that have been through it.
        mask: bool [B, seen + new] that the pass under way was given.
        passes: and operations that are over, and `begun`: how many there were when a model (its id) began the pass that
            it is in.
        start: positions when the outermost of these models began, None between passes.
        captured: the pass under way is recorded into a graph, not run: nothing is noted (`replayed` notes every
            replay).
        rehearsed: the pass under way runs for the compiler alone: it stores nothing and attends to nothing.
        text: `pages.changes` when the last `generate` ended, and the token ids [B, tokens] that it returned, which
            begin with those that are held; None where it was given no ids.
        causal: passes whose tokens see later ones are refused.
        attached: the cache was made for a model that says when a pass begins (`generation.attach`).
        asked: `pages.changes` when the sizes of masks were last asked for, which begins a pass of other models.
        told: a warning has said that the cache is used in spite of use_cache=False.

    A pass or operation is noted before the cache is asked for it, and kept when the cache says that it has ended well
    (`PagedCache.changes`): whatever an interrupt leaves out, the two never disagree.
    """

    pages: PagedCache
    new: int = 0
    been: set[int] = field(default_factory=set)
    mask: torch.Tensor | None = None
    passes: int = 0
    begun: dict[int, int] = field(default_factory=dict)
    start: int | None = None
    captured: bool = False
    rehearsed: bool = False
    text: tuple[int, torch.Tensor] | None = None
    causal: bool = False
    attached: bool = False
    asked: int | None = None
    told: bool = False
    _differs: torch.Tensor | None = None  # on a GPU: masks of single tokens that were not what they continue
    _later: Later = field(default_factory=Later)
    _passes: int = 0
    _now: tuple[int, torch.Tensor | None] = (0, None)  # seen, valid
    # `pages.changes` before what is under way; seen and valid behind it
    _next: tuple[int, int, torch.Tensor | None] | None = None

    def __post_init__(self) -> None:
        self._enter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enter()  # a copy has a number of its own

    def _enter(self) -> None:
        number = next(_numbers)
        _numbered[number] = self
        with torch.inference_mode(False):  # written inside and outside of it
            self.numbers = torch.tensor([number, self._now[0]], device="cpu")

    @contextmanager
    def causal_only(self) -> Iterator[None]:
        """Refuse inside passes whose tokens see later ones: a prompt's beginning depends on its end then."""
        self.causal = True
        try:
            yield
        finally:
            self.causal = False

    def enter(self, model: int) -> None:
        """Note that a model (its id) begins a pass, or a part of one that is in it."""
        if model in self.begun:  # the pass before broke off
            self.begun.clear()
        if not self.begun:
            self.start = self.seen
        self.begun[model] = self.passes

    def leave(self, model: int) -> int | None:
        """Note that a pass has ended well and return `passes` when it began."""
        found = self.begun.pop(model, None)
        if not self.begun:
            self.start = None
        return found

    def broken_off(self) -> int | None:
        """Give up the pass that models are in and return the positions when it began, None between passes."""
        self.begun.clear()
        start, self.start = self.start, None
        return start

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        known: torch.Tensor | None,
        valid: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
        more: bool = False,
        again: bool = False,
        within: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store k, v [B, T, H, D] and attend with q [B, T, Hq, D], as `PagedCache.step`; neither in a rehearsal
        (`rehearsed`).

        Args:
            known, valid: bool [B, seen + T] and bool [B, T], which tokens are real; None for all.
            more, again, within: see `PagedCache.step`.
        """
        if self.rehearsed:
            return q.new_empty(*q.shape[:3], v.shape[3])
        self.begin(q.shape[1], known)
        out = self.pages.step(
            layer,
            q,
            k,
            v,
            scaling=scaling,
            softcap=softcap,
            sink_logits=sink_logits,
            valid=valid,
            more=more,
            again=again,
            within=within,
        )
        if not more:
            self.note(layer, q.shape[1], known)
        return out

    @property
    def in_pass(self) -> bool:
        """Return whether a model's pass is under way that stores what `update` hands out."""
        asked = not self.attached and (self.pages.in_pass or self.asked == self.pages.changes)
        return bool(self.begun) or asked or self.captured or self.rehearsed

    @property
    def seen(self) -> int:
        """Positions before the pass under way."""
        self.settle()
        return self._now[0]

    @seen.setter
    def seen(self, n: int) -> None:
        self.settle()
        self._keep(n, self._now[1])

    @property
    def valid(self) -> torch.Tensor | None:
        """Bool [B, seen], which of them are real, wherever the mask was; None for all."""
        self.settle()
        return self._now[1]

    def lengths(self, batch: int) -> list[int] | None:
        """Return real tokens of each of `batch` sequences; None where only a mask on a GPU says so, which is not waited
        for.
        """
        seen, valid = self.seen, self.valid
        if valid is None:
            return [seen] * batch
        return valid.sum(1).tolist() if valid.device.type == "cpu" else None

    def _keep(self, seen: int, valid: torch.Tensor | None) -> None:
        self._now = seen, valid
        self.numbers[1] = seen
        self.passes += 1

    def settle(self) -> None:
        """Keep what was under way if it has ended well, forget it if it was taken back."""
        if self._next is None or self.pages.in_pass:
            return
        changes, seen, valid = self._next
        if self.pages.changes != changes:
            self._keep(seen, valid)
        self.new, self.mask = 0, None
        self.been.clear()
        self._next = None

    @contextmanager
    def becoming(self, seen: int, valid: torch.Tensor | None) -> Iterator[None]:
        """Note what this becomes by an operation of the cache, and keep it when the operation ends well."""
        self.settle()
        self._next = self.pages.changes, seen, valid
        try:
            yield
        finally:
            self.settle()

    def seen_by(self, layer: int) -> int:
        return self.seen + (self.new if layer in self.been else 0)

    def known(self, mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return bool [B, seen + num_tokens] of a mask that may be longer, checked against the masks before.

        Raises:
            UnsupportedError: a mask that ends before the new tokens, or hides tokens that are already cached.
        """
        wanted = self.seen + num_tokens
        if mask.shape[1] < wanted:
            raise UnsupportedError(
                f"attention_mask covers {mask.shape[1]} tokens, but {self.seen} are cached and {num_tokens} new ones"
                " came; pass the mask of all of them"
            )
        mask = mask[:, :wanted]
        if not self.captured and not self.been:
            self.check(mask, num_tokens)
        return mask

    def check(self, mask: torch.Tensor, num_tokens: int) -> None:
        """Refuse a mask bool [B, seen + num_tokens] that says something else about what is cached than the masks
        before. For a single token on a GPU, which nobody waits for, some passes later.

        Raises:
            UnsupportedError: it does.
        """
        past = mask[:, : self.seen]
        differs = (past != self.valid.to(past.device)).any() if self.valid is not None else ~past.all()
        if mask.device.type == "cpu" or num_tokens > 1:
            if bool(differs):
                raise UnsupportedError(f"attention_mask hides {_OTHER_MASK}")
            return
        self._differs = differs if self._differs is None else self._differs | differs
        self._passes += 1
        if self._passes % LOOK_EVERY == 0 and not torch.cuda.is_current_stream_capturing():
            found = self._later.ask(self._differs)
            if found is not None and bool(found):
                self._differs = None
                raise UnsupportedError(f"the attention_mask of an earlier token hid {_OTHER_MASK}")

    def begin(self, new: int, mask: torch.Tensor | None) -> None:
        """Note that a layer is about to store `new` positions per sequence; `mask` bool [B, seen + new], None for all
        real.

        The same for all layers of a pass.
        """
        if not self.captured and not self.been:
            self.settle()
            self._next = self.pages.changes, *self._after(new, mask)

    def _after(self, new: int, mask: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
        """Return seen and valid once a pass is over."""
        seen, valid = self._now
        if mask is not None:
            valid = None if mask.device.type == "cpu" and bool(mask.all()) else mask
        elif valid is not None:
            valid = torch.cat([valid, valid.new_ones(len(valid), new)], 1)
        return seen + new, valid

    def note(self, layer: int, new: int, mask: torch.Tensor | None) -> None:
        """Note that a layer has stored its positions; the last layer ends the pass."""
        if self.captured:
            return
        self.new, self.mask = new, mask
        self.been.add(layer)
        self.settle()

    def replayed(self, mask: torch.Tensor | None) -> None:
        """Note that a captured pass of one token has run; `mask` bool [B, seen + 1] as `known` gave it, None for all
        real.
        """
        self.settle()
        self._keep(*self._after(1, mask))


class HoldsPages(Protocol):
    """Interface of a `KVCache` to the modules that it is made of."""

    pages: PagedCache
    columns: Columns
    layers: tuple[Any, ...]

    def get_seq_length(self) -> int:
        """Return the number of positions so far, padding included."""

    def reset(self) -> None:
        """Forget all sequences."""

    def enter_pass(self) -> None:
        """Note that a forward pass begins, or a part of the model that it goes through.

        Raises:
            CacheStateError: the pass before broke off and cannot be undone; sequences were changed through `pages`.
        """

    def leave_pass(self) -> None:
        """Note that a forward pass has ended well."""

    def abandon(self) -> None:
        """Take back a pass that not all layers have been through."""


def is_ours(cache: Any) -> bool:
    """Return whether an object is a `KVCache`."""
    return isinstance(getattr(cache, "columns", None), Columns)


def name_for(model: Any) -> str:
    """Return the name by which the forward pass of a model calls its cache."""
    return CACHE_NAMES[0] if CACHE_NAMES[0] in inspect.signature(model.forward).parameters else CACHE_NAMES[1]


def passed(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument of a forward pass or of `generate`."""
    return {name_for(model): cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among arguments by name, which may be those of a caller; None without one."""
    return next((x for name in CACHE_NAMES if (x := arguments.get(name)) is not None), None)


_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, Columns] = weakref.WeakValueDictionary()


def numbered(number: int) -> Columns:
    """Return the columns that have this number."""
    return _numbered[number]


@dataclass(eq=False)
class Mask(NotATensor):
    """Arguments that the mask function was given. They become a real mask only for caches that are not ours."""

    _why: ClassVar[str] = (
        f"the {NAME!r} attention builds no mask tensor, but this model or cache wants one (static and compiled caches"
        " do); call KVCache.detach(model), which gives the model its own attention back, or use a KVCache or"
        " DynamicCache"
    )
    ndim: ClassVar[int] = 4  # made already: a model that was given it makes no other of it
    batch_size: int
    q_length: int
    attention_mask: torch.Tensor | None  # bool [B, tokens seen + q_length]
    unusual: str | None  # why this is not a causal mask with padding and window
    arguments: dict[str, Any]
    made: list[torch.Tensor | None] = field(default_factory=list)  # the dense mask, once a layer wanted it
    _known: tuple[torch.Tensor, torch.Tensor] | None = None
    _within: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def is_causal(self) -> bool:
        """Return whether no token sees those behind it, but where `dense` says so."""
        return self.arguments.get("allow_is_bidirectional_skip") is None

    @property
    def shape(self) -> torch.Size:
        """[B, 1, T, tokens] of the mask that was asked for: the models that nest others ask how long it is."""
        return torch.Size((self.batch_size, 1, self.q_length, self.arguments["kv_length"]))

    def within(self, window: int | None) -> torch.Tensor | None:
        """Return which tokens of its own chunk each token sees, bool [B, T, T], or None where that is all before it.

        Exceptions are images whose tokens see each other (Gemma 3), and packed sequences. The result is the same for
        all layers.

        Raises:
            UnsupportedError: tokens that came before this chunk are hidden or shown in another way than by causal
                order, padding and the window.
        """
        if self.unusual is None:
            return None
        if not self._within:
            self._within.append(self._chunk(window))
        return self._within[0]

    def _chunk(self, window: int | None) -> torch.Tensor | None:
        dense = None if self.unusual == BIDIRECTIONAL else self.dense()
        if dense is None:
            raise UnsupportedError(
                f"the model asked for {self.unusual}; kvbits supports causal attention with padding and sliding windows"
            )
        seen = dense[:, 0]
        new, before = self.q_length, seen.shape[2] - self.q_length
        start, first = self.arguments["kv_offset"], self.arguments["q_offset"]
        at = torch.arange(start, start + before, device=seen.device)
        row = torch.arange(first, first + new, device=seen.device)[:, None]
        plain = (
            (at > row - window) if window is not None else torch.ones(new, before, dtype=torch.bool, device=seen.device)
        )
        plain = (
            plain[None] if self.attention_mask is None else plain & self.attention_mask[:, None, start : start + before]
        )
        if not torch.equal(seen[:, :, :before], plain.expand(len(seen), -1, -1)):
            raise UnsupportedError(
                f"the model asked for {self.unusual} over tokens that are cached; kvbits supports that among the tokens"
                " of one pass only: pass them (an image whole) in one chunk"
            )
        return seen[:, :, before:].expand(self.batch_size, -1, -1)

    def known(self, columns: Columns) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (bool [B, tokens seen + T], bool [B, T]): which tokens are real, of all and of those of this pass;
        None for all. The same for all layers.

        Raises:
            UnsupportedError: a mask that ends before the new tokens, or hides tokens that are already cached.
        """
        if self.attention_mask is None:
            return None, None
        if self._known is None:  # the first layer asks
            known = columns.known(self.attention_mask, self.q_length)
            self._known = known, known[:, -self.q_length :]
        return self._known

    def dense(self, rows: int | None = None) -> torch.Tensor | None:
        """Return bool [B, 1, T, tokens]; None where SDPA needs no mask: for the plain causal one, and for a
        bidirectional one that hides nothing. With `rows`, fewer than T, of the last so many queries.
        """
        if rows is not None and rows < self.q_length:
            whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            return sdpa_mask(**self.arguments | whole)[:, :, -rows:]
        if not self.made:  # one for all layers of a pass
            self.made.append(sdpa_mask(**self.arguments))
        return self.made[0]

    def __getitem__(self, index: object) -> Mask:  # type: ignore[override]
        """Return the same for the last queries alone: Gemma 4 leaves out the others in layers that share keys and
        values.
        """
        if isinstance(index, tuple) and [type(i) for i in index] == [slice] * 4 and index[2].stop is None:
            return self
        self._refuse()


def mask(**arguments: Any) -> Mask:
    """Make a mask, as the mask function of the "kvbits" attention (signature of
    `transformers.masking_utils.sdpa_mask`).
    """
    if isinstance(made := arguments.get("attention_mask"), Mask):
        return made
    unusual = None
    if arguments.get("use_vmap"):
        unusual = "a custom mask pattern"
    elif arguments.get("allow_is_bidirectional_skip") is not None and "allow_is_causal_skip" not in arguments:
        unusual = BIDIRECTIONAL
    # said of every token of a cache that can be captured
    elif not arguments.get("allow_is_causal_skip", True) and arguments["q_length"] > 1:
        unusual = "a packed, blockwise or otherwise modified causal mask"
    # of a static cache, which counts on in it before a layer wants the mask
    if isinstance(offset := arguments.get("q_offset"), torch.Tensor):
        arguments["q_offset"] = offset.clone()
    return Mask(arguments["batch_size"], arguments["q_length"], arguments.get("attention_mask"), unusual, arguments)


AttentionMaskInterface.register(NAME, mask)
