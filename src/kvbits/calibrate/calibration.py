"""Static scales, codebooks and bases of a model and scheme, and what they were measured for.

File: safetensors. Tensors `layers.{i}.k_scale`, `.k_bias`, `.v_scale`, `.v_bias`, float32 [H, groups or channels], only
where the layer's spec is static (and has a bias), `.k_codebook`, `.v_codebook` [H, entries] of nuq formats, and
`.k_basis` [H, D, D] of keys in a calibrated basis. Metadata, JSON text each: `format` "kvbits-calibration", `version`,
`fingerprint`, `info`, and `checksum`: SHA-256 over the others and every tensor, so that a file with a flipped bit is
refused.

The fingerprint is what changes keys and values or how they are coded: sizes of the model, rotary parameters, geometry
per layer, the static specs per layer. Floats are compared at 6 digits, because GGUF files keep them in float32. It does
not see weights: fine-tunes of one architecture share a fingerprint, `info["measured_on"]` has the identity and dtype of
the model that was measured (`Calibration.suits`), and `info["model"]` its name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CalibrationError, FileFormatError
from ..files import whole
from ..geometry import layer_geometries, text_config
from ..ops.static import calibrated
from ..quant.basis import for_widths
from ..spec import LayerGeometry, QuantSpec, Scheme, from_dict, to_dict

FORMAT = "kvbits-calibration"
VERSION = 4
"""4: means of keys by runs of 16 positions, in frames of 512."""

_MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "layer_norm_eps",
    "attention_bias",
    "qkv_bias",
    "use_qk_norm",
)
_ROPE_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_OF_MODEL = ("model", "rope", "geometry")
_SHOWN = 4
_SHOWN_DIFFERENCES = 2


def fingerprint(config: Any, scheme: Scheme) -> dict[str, Any]:
    """Return what a calibration of `scheme` on a model with this configuration depends on, as plain JSON data.

    Args:
        config: the model's Transformers configuration.

    Raises:
        UnsupportedError: a model without a plain KV cache.
    """
    layers = layer_geometries(config)
    text = text_config(config)
    specs = [scheme.for_layer(i, len(layers)) for i in range(len(layers))]
    rope = {name: getattr(text, name, None) for name in _ROPE_FIELDS}
    if rope["rope_parameters"]:  # transformers 5 keeps the older fields beside it, or not
        rope = {"rope_parameters": rope["rope_parameters"]}
    return _plain(
        {
            "model": {name: getattr(text, name, None) for name in _MODEL_FIELDS},
            "rope": rope,
            "geometry": [to_dict(g) for g in layers],
            "specs": [
                {"k": to_dict(k) if k.needs_calibration else None, "v": to_dict(v) if v.needs_calibration else None}
                for k, v in specs
            ],
        }
    )


def _plain(value: Any) -> Any:
    """Return JSON data with floats at 6 digits and without None members."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        rounded = float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value if isinstance(value, int | str) or value is None else str(value)


def _differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Return sentences "path is X here and Y in the calibration" for every leaf that differs."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            d
            for k in dict.fromkeys([*ours, *theirs])
            for d in _differences(ours.get(k), theirs.get(k), f"{path}.{k}" if path else k)
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in _differences(a, b, f"{path}[{i}]")
        ]
    if ours == theirs:
        return []
    if isinstance(ours, list) and isinstance(theirs, list):
        return [f"{path} has {len(ours)} entries here and {len(theirs)} in the calibration"]
    return [f"{path} is {_short(ours)} here and {_short(theirs)} in the calibration"]


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, eq=False)
class Calibration:
    """Static scales, codebooks and bases per layer.

    Attributes:
        static: per layer a dict of `k_scale`, `k_bias`, `v_scale`, `v_bias`, float32 [H, groups or channels],
            `k_codebook`, `v_codebook`, `k_basis` (only those that the specs need): what `PagedCache(static=...)` takes.
        fingerprint: what they were measured for (see `fingerprint`).
        info: how: model name, percentile, prompts (windows of the text), tokens, skipped tokens.
        path: the file that it was loaded from or is kept in, for messages.
    """

    static: list[dict[str, torch.Tensor]]
    fingerprint: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)
    path: str | None = None

    def __repr__(self) -> str:
        """Return a short form: the scales themselves are in `static`."""
        info, where = self.info, "" if self.path is None else f", {self.path}"
        text = f" on {info['text']}" if "text" in info else ""
        what = f"{info.get('scheme', '?')} of {info.get('model', '?')}"
        return (
            f"<Calibration {self.id}: {what}, {len(self.static)} layers, {info.get('tokens', 0):,} tokens{text}{where}>"
        )

    @functools.cached_property
    def id(self) -> str:
        """16 hex digits naming the scales and what they are for; equal ids mean interchangeable pages."""
        digest = hashlib.sha256(json.dumps(self.fingerprint, sort_keys=True).encode())
        for i, tensors in enumerate(self.static):
            for name in sorted(tensors):
                digest.update(f"{i}.{name}".encode() + tensors[name].cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def _made(self) -> dict[str, Calibration]:
        """Calibrations that `fitted` made from this one, by fingerprint."""
        return {}

    @property
    def _named(self) -> str:
        return "this calibration" if self.path is None else f"calibration {self.path}"

    def fits(self, config: Any, scheme: Scheme) -> bool:
        """Return whether this calibration serves this model and scheme."""
        return scheme.needs_calibration and self._serving(fingerprint(config, scheme)) is not None

    def fitted(self, config: Any, scheme: Scheme) -> Calibration:
        """Return the calibration that this model and scheme take. It is this calibration itself if that matches. If
        only the widths of bands differ or fewer layers have a basis, the result has the same directions in other steps.
        So a calibration that was measured for one klt preset serves all.

        Raises:
            CalibrationError: another model or scheme; names the file, what differs and the command that makes the right
                one.
        """
        if not scheme.needs_calibration:
            raise CalibrationError(
                f"scheme {scheme.name!r} needs no calibration: it takes its scales from each page, and {self._named}"
                f" was made for scheme {self.info.get('scheme', 'another')!r}; leave calibration out, or take that"
                " scheme"
            )
        ours = fingerprint(config, scheme)
        if ours == self.fingerprint:
            return self
        if (name := json.dumps(ours)) in self._made:
            return self._made[name]
        if (static := self._serving(ours)) is not None:
            return self._made.setdefault(
                name, Calibration(static, ours, self.info | {"scheme": scheme.name}, self.path)
            )
        of_model, of_scheme = (
            _differences({k: ours[k] for k in keys}, {k: self.fingerprint.get(k) for k in keys})
            for keys in (_OF_MODEL, ("specs",))
        )
        theirs = self.info.get("scheme", scheme.name)
        made, found = [], of_model
        if of_model:
            made.append("another model" + (f" ({self.info['model']})" if "model" in self.info else ""))
        if of_scheme and theirs != scheme.name:
            made.append(f"scheme {theirs!r}, not {scheme.name!r}")
        elif of_scheme and not of_model:  # of another model, they may differ by its layers alone
            made.append(f"another {scheme.name!r}")
            found = of_scheme
        more = f" and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
        what = f" ({'; '.join(found[:_SHOWN_DIFFERENCES])}{more})" if found else ""
        raise CalibrationError(
            f"{self._named} was made for {' and '.join(made)}{what}; run `kvbits calibrate` for this model and scheme"
        )

    def _serving(self, ours: dict[str, Any]) -> list[dict[str, torch.Tensor]] | None:
        """Return `static` for a fingerprint that differs by no more than `fitted` bridges, or None."""
        if ours == self.fingerprint:
            return self.static
        if any(ours[name] != self.fingerprint.get(name) for name in _OF_MODEL):
            return None
        found: list[dict[str, torch.Tensor]] = []
        for layer, wanted, had in zip(self.static, ours["specs"], self.fingerprint["specs"], strict=True):
            found.append({})
            for side in "kv":
                tensors = {name: t for name, t in layer.items() if name.startswith(f"{side}_")}
                if wanted.get(side) != had.get(side):
                    was: QuantSpec | None = from_dict(had[side]) if side in had else None
                    if was is None or "basis" not in was.calibrates:
                        return None
                    if side not in wanted:
                        continue
                    spec: QuantSpec = from_dict(wanted[side])
                    if dataclasses.replace(spec, bands=was.bands) != was:
                        return None
                    tensors["k_basis"] = for_widths(tensors["k_basis"], was, spec)
                found[-1] |= tensors
        return found

    def suits(self, model: Any) -> bool:
        """Return whether this calibration was measured on this very model, as far as `info` tells. The model must have
        the same `kvbits.identity`. A model in a different dtype cannot be compared, and suits.
        """
        from ..integrations.identity import identity

        measured = self.info.get("measured_on")
        if not isinstance(measured, dict) or measured.get("dtype") != str(model.dtype):
            return True
        return bool(measured.get("identity") == identity(model))

    def to(self, device: torch.device | str) -> Calibration:
        """Return the same scales on another device."""
        return Calibration(
            [{k: v.to(device) for k, v in tensors.items()} for tensors in self.static],
            self.fingerprint,
            self.info,
            self.path,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file. It replaces an existing one only when the new one is whole."""
        tensors = {
            f"layers.{i}.{name}": t.cpu().contiguous()
            for i, layer in enumerate(self.static)
            for name, t in layer.items()
        }
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "fingerprint": json.dumps(self.fingerprint, sort_keys=True),
            "info": json.dumps(self.info, sort_keys=True),
        }
        write_file(path, tensors, metadata | {"checksum": _checksum(metadata, tensors)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote.

        Raises:
            FileFormatError: no such file, truncated, damaged, foreign, of another version, or holding other tensors
                than its fingerprint says.
        """
        metadata, tensors = read_file(path)
        if metadata.get("format") != FORMAT:
            raise FileFormatError(
                f"{path} is not a kvbits calibration (format {metadata.get('format')!r}, expected {FORMAT!r})"
            )
        if metadata.get("version") != str(VERSION):
            raise FileFormatError(
                f"{path} has calibration version {metadata.get('version')}, this kvbits reads {VERSION}; calibrate"
                " again"
            )
        try:
            made_for = json.loads(metadata["fingerprint"])
            found = cls([{} for _ in made_for["specs"]], made_for, json.loads(metadata["info"]), os.fspath(path))
            wanted = _wanted(found.fingerprint)
            if not isinstance(found.info, dict):
                raise TypeError(f"info is {found.info!r}")
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise FileFormatError(f"{path} has damaged metadata: {e!r}; calibrate again") from e
        if set(tensors) != set(wanted):
            raise FileFormatError(
                f"{path} lacks or adds tensors: {', '.join(sorted(set(tensors) ^ set(wanted))[:_SHOWN])}; calibrate"
                " again"
            )
        for name, t in tensors.items():
            _, layer, kind = name.split(".")
            if t.dtype != torch.float32 or tuple(t.shape) != wanted[name]:
                raise FileFormatError(
                    f"{path}: {name} is {t.dtype} {tuple(t.shape)}, expected float32 {wanted[name]}; calibrate again"
                )
            if not bool(torch.isfinite(t).all()) or (kind.endswith("_scale") and not bool((t > 0).all())):
                raise FileFormatError(
                    f"{path}: {name} holds values no scale can have (zero, negative, infinite or NaN); calibrate again"
                )
            found.static[int(layer)][kind] = t
        if _checksum({k: v for k, v in metadata.items() if k != "checksum"}, tensors) != metadata.get("checksum"):
            raise FileFormatError(
                f"{path} is damaged: its data does not match its checksum; copy it again, or calibrate again"
            )
        return found


def _checksum(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name].cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode() + t.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_file(path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file; an existing one is replaced only once the new one is whole.

    Raises SpecError where no file can be.
    """
    from safetensors.torch import save

    with whole(path) as partial:
        partial.write_bytes(save(tensors, metadata=metadata))


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return (metadata, tensors) of a safetensors file. Raises FileFormatError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise FileFormatError(f"cannot read {path}: {e}; it must be a file written by `kvbits calibrate`") from e


def _wanted(prints: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return tensor names and shapes that a fingerprint calls for."""
    found: dict[str, tuple[int, ...]] = {}
    for i, (geometry, specs) in enumerate(zip(prints["geometry"], prints["specs"], strict=True)):
        for side, data in specs.items():
            spec: QuantSpec = from_dict(data)
            heads = LayerGeometry(
                **{name: geometry.get(name) for name in ("num_kv_heads", "head_dim", "value_head_dim")}
            )
            found |= {
                f"layers.{i}.{name}": shape
                for name, shape in calibrated(spec, side, heads.num_kv_heads, heads.dim(side)).items()
            }
    return found
