"""Every error this library raises on purpose.

    KvbitsError
    ├── SpecError (ValueError)          an invalid spec, scheme, geometry or option
    ├── DataError (ValueError)          tensors with the wrong shape, dtype, device, or with NaN or infinity
    │   └── ScaleOverflowError      a scale, bias or mean that its storage dtype does not hold
    ├── UnsupportedError                a model or call outside what the library can do correctly
    ├── CacheError (RuntimeError)
    │   ├── PoolFullError               no free page; nothing was changed
    │   └── CacheStateError             an operation the cache's present state does not allow
    ├── FileFormatError (ValueError)    a saved file that is corrupt, foreign or of another version
    ├── CalibrationError (ValueError)   calibration missing, or made for another model or scheme
    └── KernelError (RuntimeError)      a kernel that does not compile, load or launch

Messages give the value, the limit and the way out. What is only unwise is a `KvbitsWarning`.
"""

import difflib
from collections.abc import Iterable


class KvbitsError(Exception):
    """Base class of every error raised on purpose by kvbits."""


class KvbitsWarning(UserWarning):
    """Something that works and is likely not what was wanted, such as a scheme that is known to be unfit for
    a model.
    """


class SpecError(KvbitsError, ValueError):
    """An invalid spec, scheme, geometry or option."""


class DataError(KvbitsError, ValueError):
    """Tensors with the wrong shape, dtype or device, or holding NaN or infinity."""


class ScaleOverflowError(DataError):
    """A scale, bias or mean that its storage dtype does not hold."""


class UnsupportedError(KvbitsError):
    """A model or call outside what the library can do correctly."""


class CacheError(KvbitsError, RuntimeError):
    """A cache operation that could not be carried out."""


class PoolFullError(CacheError):
    """No free page. The operation changed nothing: free sequences or raise the capacity and repeat it."""


class CacheStateError(CacheError):
    """An operation the present state of the cache does not allow."""


class FileFormatError(KvbitsError, ValueError):
    """A saved file that is corrupt, foreign or of another version."""


class CalibrationError(KvbitsError, ValueError):
    """Calibration that is missing, or was made for another model or scheme."""


class KernelError(KvbitsError, RuntimeError):
    """A kernel that does not compile, load or launch: a broken installation or a bug, never a reason to take a slower
    path silently.
    """


GONE = {"int4_rotated": "klt4", "kvbits_int4_rotated": "kvbits_klt4"}
"""Formats of older versions, and which is to be used instead."""


EXTRAS = {
    "torch": "'kvbits[torch]'",
    "filelock": "'kvbits[torch]'",
    "xxhash": "'kvbits[torch]'",
    "fsspec": "'kvbits[torch]'",
    "transformers": "'kvbits[hf]'",
    "gguf": "'kvbits[hf]'",
    "accelerate": "'kvbits[hf]'",
    "tokenizers": "'kvbits[hf]'",
    "vllm": "'kvbits[vllm]'",
    "matplotlib": "'kvbits[test]'",
    "huggingface_hub": "huggingface_hub",
}
"""Packages that some of kvbits needs, and what installs them."""


def to_install(error: ModuleNotFoundError, also: str | None = None) -> str | None:
    """Return what to install, as a sentence, where a package is missing that `EXTRAS` names; None where another is.

    Args:
        also: a package of `EXTRAS` that is needed after the missing one, so that both come at once.
    """
    package = (error.name or "").split(".")[0]
    return (
        f"this needs {error.name}, which is not installed; run `pip install {EXTRAS[also or package]}`"
        if package in EXTRAS
        else None
    )


def unknown(what: str, name: object, known: Iterable[object], more: str = "") -> str:
    """Return a message that there is nothing of a name, what it may have meant, and what there is.

    Args:
        what: the kind of thing, like "scheme".
        more: what else it could be, after the list.
    """
    names = [str(k) for k in known]
    if instead := GONE.get(str(name)):
        instead = instead if instead in names else instead.removeprefix("kvbits_")
        return (
            f"there is no {what} {name!r} any more: {instead} has a tenth to a third of its KL in fewer bytes; use"
            f" {instead}"
        )
    near = difflib.get_close_matches(str(name).lower(), names, n=2, cutoff=0.6)
    meant = f" did you mean {' or '.join(near)}?" if near else ""
    return f"unknown {what} {name!r};{meant} known: {', '.join(names)}{more}"


def too_small(name: str, value: float, least: float) -> str:
    """Return a message that a number is below its limit."""
    return f"{name}={value} must be at least {least}"


def counted(n: int, noun: str) -> str:
    """Return a number of things, for messages: "1 page", "2 pages"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
