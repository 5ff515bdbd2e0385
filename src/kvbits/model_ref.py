"""One value for a model: its name, configuration, layers and weights, looked up once and passed on.

ModelRef.find("Qwen/Qwen3-8B")       one that is to be loaded: refused at once where nothing is there
ModelRef.stated("Qwen/Qwen3-8B")     one that is only planned for: its config.json is read as data
ModelRef.of(model)                   one that Transformers has loaded
ModelRef("", layers=layers)          layers of no model
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from . import geometry
from .errors import SpecError, UnsupportedError
from .geometry import PlainLayer
from .spec import LayerGeometry


class ModelRef:
    """A model by its name, and what is known about it.

    Args:
        name: a local directory, a config.json, a GGUF file, a hub id, or `embedded`; "" where it has none.
        config: its configuration, where the caller has it; otherwise Transformers' is read.
        layers: those of no model: there is no configuration.
        loaded: the model itself, where Transformers has loaded it.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        config: Any = None,
        *,
        layers: tuple[LayerGeometry, ...] | None = None,
        loaded: Any = None,
    ) -> None:
        self.name, self.loaded = str(name), loaded
        if layers is not None:
            self.layers = layers
        if config is not None or layers is not None:
            self.config = config

    @classmethod
    def find(cls, name: str) -> ModelRef:
        """Refer to a model that is to be loaded, without asking the hub.

        Raises:
            SpecError, UnsupportedError: as `source`.
        """
        (found := cls(name))._find(look_up=False)
        return found

    @classmethod
    def stated(cls, name: str) -> ModelRef:
        """Refer to a model by its config.json as data (`config_file.read_config`), without Transformers.

        Raises:
            SpecError: as `config_file.read_config`.
        """
        from .config_file import read_config

        return cls(name, read_config(name))

    @classmethod
    def of(cls, model: Any) -> ModelRef:
        """Refer to a loaded model of Transformers."""
        name = getattr(model, "kvbits_source", "") or getattr(model, "name_or_path", "")
        return cls(name, model.config, loaded=model)

    def __str__(self) -> str:
        return self.name

    @property
    def short_name(self) -> str:
        """The last part of its name."""
        return Path(self.name.rstrip("/")).name

    @cached_property
    def config(self) -> Any:
        """Its Transformers configuration, or what the caller gave; None of layers alone."""
        return geometry.load_config(self.name)

    @cached_property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Shapes of its layers (`geometry.layer_geometries`)."""
        return geometry.layer_geometries(self.config)

    @cached_property
    def planned(self) -> tuple[tuple[LayerGeometry | PlainLayer, ...], str | None]:
        """(`layers`, None); or, of a model whose layers no page can hold, the layers of its 16-bit cache, and why.

        Raises:
            UnsupportedError: its configuration does not say that either.
        """
        try:
            return self.layers, None
        except UnsupportedError as e:
            try:
                return geometry.plain_layers(self.config), str(e)
            except UnsupportedError:
                raise e from None

    @property
    def max_context(self) -> int | None:
        """Most tokens that it was made for, where its configuration says."""
        return geometry.max_context(self.config)

    @property
    def query_heads(self) -> int | None:
        """Query heads of a layer, where its configuration says one number."""
        return geometry.query_heads(self.config)

    @cached_property
    def state_bytes(self) -> int | None:
        """Bytes of the recurrent states of a sequence (`geometry.state_bytes`); 0 where `planned` has no pages."""
        return 0 if self.config is None or self.planned[1] is not None else geometry.state_bytes(self.config)

    @cached_property
    def source(self) -> Path | str:
        """The path or hub id to load it from.

        Raises:
            SpecError: as `geometry.find_model`.
            UnsupportedError: as `geometry.find_model`; a file that holds no weights.
        """
        return self._find(look_up=True)

    @property
    def local_path(self) -> Path | None:
        """The directory or GGUF file on this disk that its weights are in. None without one, and for a hub id whose
        configuration is not in the cache.
        """
        try:
            path = self._find(look_up=False)
        except (SpecError, UnsupportedError):
            return None
        return path if isinstance(path, Path) else geometry.cached_folder(path)

    def _find(self, look_up: bool) -> Path | str:
        path = geometry.find_model(self.name, look_up=look_up)
        if isinstance(path, Path) and path.is_file() and path.suffix != ".gguf":
            raise UnsupportedError(
                f"cannot load a model from the file {str(path)!r}; give the directory that holds its config.json and"
                " weights, or a GGUF file"
            )
        return path
