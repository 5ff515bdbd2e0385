"""One value for a model: what commands and calibrations know about it before its weights are loaded.

ref = ModelRef.find("Qwen/Qwen3-8B")    # a path, hub id or `embedded`; refused at once where nothing is there
ref.config, ref.layers, ref.max_context, ref.source, ref.local_path    # looked up at the first use, once
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from . import geometry
from .errors import SpecError, UnsupportedError
from .spec import LayerGeometry


class ModelRef:
    """A model by its name, and what is known about it.

    Args:
        name: a local directory, a config.json, a GGUF file, a hub id, or `embedded`; "" for a model built in memory.
        config: its configuration, where the caller has it; otherwise Transformers' is read.
    """

    def __init__(self, name: str | os.PathLike[str], config: Any = None) -> None:
        self.name = str(name)
        if config is not None:
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
    def of(cls, model: Any) -> ModelRef:
        """Refer to a loaded model of Transformers."""
        return cls(getattr(model, "kvbits_source", "") or getattr(model, "name_or_path", ""), model.config)

    def __str__(self) -> str:
        return self.name

    @property
    def short_name(self) -> str:
        """The last part of its name."""
        return Path(self.name.rstrip("/")).name

    @cached_property
    def config(self) -> Any:
        """Its Transformers configuration, or what the caller gave."""
        return geometry.load_config(self.name)

    @cached_property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Shapes of its layers (`geometry.layer_geometries`)."""
        return geometry.layer_geometries(self.config)

    @property
    def max_context(self) -> int | None:
        """Most tokens that it was made for, where its configuration says."""
        return geometry.max_context(self.config)

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
        """The directory or GGUF file on this disk that its weights are in, or None: also for a hub id whose
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
