"""Classes of Transformers' caches whose every public name either does what it does there or refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import UnsupportedError


class NotHereError(UnsupportedError, AttributeError):
    """A name of Transformers' caches that a KVCache does not have, so `hasattr` answers False."""


class Closed:
    """An object that takes no attribute which nobody reads, and has no inherited name which nobody looked at."""

    _open: tuple[str, ...] = ()
    """Public attributes that may be set; methods may be replaced."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked = {name for base in cls.__mro__ if base.__module__.startswith(__package__) for name in vars(base)}
        checked |= {name for base in cls.__mro__ for name in vars(base).get("_inherits", ())}
        for name in {name for name in dir(cls) if not name.startswith("_")} - checked:
            setattr(cls, name, refused(name))

    def __setattr__(self, name: str, value: Any) -> None:
        known = name.startswith("_") or name in self._open or callable(getattr(type(self), name, None))
        if not known and "_ready" in self.__dict__:
            raise NotHereError(
                f"{type(self).__name__}.{name} cannot be set: a KVCache keeps pages, and nobody reads this; change it"
                " by its methods (crop, batch_select_indices, reset ..), or use the stock cache"
            )
        super().__setattr__(name, value)


def refused(name: str) -> property:
    """Return a property that raises: reading it would give what a KVCache does not have."""

    def refuse(self: Any, value: Any = None) -> NoReturn:
        raise NotHereError(
            f"{type(self).__name__} has no {name!r}: a KVCache keeps pages, not the tensors of Transformers' caches;"
            " cache.pages.dequantize(layer, row) gives a sequence's keys and values, and the stock cache has the rest"
        )

    return property(refuse, refuse, refuse)
