"""Codes to bytes and back, in the stored order of docs/reference/formats.md.

A code's bit planes are packed into rows (one token, one plane), then rows are interleaved: keys in tiles of 16 tokens,
values in blocks of 16 bytes by four tokens. Rows of a plane of trellis keys are packed word by word, so that no word
has fields of two planes' lowest bits and other bits side by side. All functions keep leading dimensions and copy.
"""

from __future__ import annotations

import functools

import torch

from ..spec import (
    BAND,
    BAND_PLANES,
    KEY_TILE,
    VALUE_BLOCK,
    VALUE_TOKEN_ORDER,
    NumberFormat,
    QuantSpec,
    plane_row_bytes,
)


def pack(codes: torch.Tensor, fmt: NumberFormat, kind: str) -> list[torch.Tensor]:
    """Return stored bytes of each plane, [..., tokens * row_bytes].

    Args:
        codes: uint8 [..., tokens, head_dim]; tokens a multiple of 16 for keys and of 8 for values.
        kind: "k" or "v": which interleaving.
    """
    return [_interleave(rows, kind) for rows in _rows_of_fields(codes, fmt)]


def unpack(planes: list[torch.Tensor], fmt: NumberFormat, kind: str, tokens: int, head_dim: int) -> torch.Tensor:
    """Return codes uint8 [..., tokens, head_dim] from the stored bytes of each plane."""
    codes = None
    for plane, bits in zip(planes, fmt.planes, strict=True):
        row_bytes = plane_row_bytes(head_dim, bits)
        rows = (
            _deinterleave_keys(plane, tokens, row_bytes)
            if kind == "k"
            else _deinterleave_values(plane, tokens, row_bytes)
        )
        field = unpack_rows(rows, bits, head_dim)
        codes = field if codes is None else (codes << bits) | field
    assert codes is not None
    return codes


@functools.lru_cache(maxsize=64)
def plane_fields(widths: tuple[int, ...], head_dim: int) -> tuple[tuple[int, torch.Tensor, torch.Tensor], ...]:
    """Return (bits, channels int64 [n], shifts uint8 [n]) of each stored plane of trellis codes: number j of a token's
    row is (code of channel j >> shift j) & (2**bits - 1).
    """
    found = []
    for bits in BAND_PLANES:
        if channels := [c for c in range(head_dim) if widths[c // BAND] & bits]:
            shifts = [widths[c // BAND] & (bits - 1) for c in channels]  # the planes below it
            found.append(
                (bits, torch.tensor(channels, device="cpu"), torch.tensor(shifts, dtype=torch.uint8, device="cpu"))
            )
    return tuple(found)


def unpack_trellis(
    planes: list[torch.Tensor], widths: tuple[int, ...], kind: str, tokens: int, head_dim: int
) -> torch.Tensor:
    """Return codes uint8 [..., tokens, head_dim] from the stored bytes of each plane; 0 in bands without bits."""
    codes = torch.zeros(*planes[0].shape[:-1], tokens, head_dim, dtype=torch.uint8, device=planes[0].device)
    for plane, (bits, channels, shifts) in zip(planes, plane_fields(widths, head_dim), strict=True):
        row_bytes = plane_row_bytes(len(channels), bits)
        if kind == "k":
            fields = unpack_words(_deinterleave_keys(plane, tokens, row_bytes), bits, len(channels))
        else:
            fields = unpack_rows(_deinterleave_values(plane, tokens, row_bytes), bits, len(channels))
        codes[..., channels.to(codes.device)] |= fields << shifts.to(codes.device)
    return codes


def pack_side(codes: torch.Tensor, spec: QuantSpec, kind: str) -> list[torch.Tensor]:
    """Return stored bytes of each plane of keys ("k") or values ("v") of a format; codes uint8 [..., tokens,
    head_dim].
    """
    return [_interleave(rows, kind) for rows in rows_of_planes(codes, spec, kind)]


def rows_of_planes(codes: torch.Tensor, spec: QuantSpec, kind: str) -> list[torch.Tensor]:
    """Return uint8 [..., row_bytes] of each plane, before rows are interleaved; codes uint8 [..., head_dim].

    A plane of trellis codes holds the channels of the bands that have it, side by side; of keys ("k") word by word.
    """
    if not spec.is_trellis:
        return _rows_of_fields(codes, spec.number_format)
    fields = plane_fields(spec.widths(codes.shape[-1]), codes.shape[-1])
    packed = pack_words if kind == "k" else pack_rows
    return [
        packed((codes[..., channels.to(codes.device)] >> shifts.to(codes.device)) & (2**bits - 1), bits)
        for bits, channels, shifts in fields
    ]


def _rows_of_fields(codes: torch.Tensor, fmt: NumberFormat) -> list[torch.Tensor]:
    """Return the same of codes that all have the planes of a format."""
    below = [sum(fmt.planes[i + 1 :]) for i in range(len(fmt.planes))]
    return [pack_rows((codes >> shift) & (2**bits - 1), bits) for bits, shift in zip(fmt.planes, below, strict=True)]


def _interleave(rows: torch.Tensor, kind: str) -> torch.Tensor:
    return _interleave_keys(rows) if kind == "k" else _interleave_values(rows)


def unpack_side(planes: list[torch.Tensor], spec: QuantSpec, kind: str, tokens: int, head_dim: int) -> torch.Tensor:
    """Return codes uint8 [..., tokens, head_dim] from the stored bytes of each plane of keys or values of a format."""
    if spec.is_trellis:
        return unpack_trellis(planes, spec.widths(head_dim), kind, tokens, head_dim)
    return unpack(planes, spec.number_format, kind, tokens, head_dim)


def row_positions(tokens: int, row_bytes: int, kind: str) -> torch.Tensor:
    """Return int64 [tokens, row_bytes]: where a stored plane of keys ("k") or values ("v") has each byte of each
    token's row.

    No two tokens share a byte.
    """
    rows = torch.arange(tokens * row_bytes, device="cpu").view(tokens, row_bytes)
    return _interleave(rows, kind).argsort().view(tokens, row_bytes)


def pack_rows(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 [..., head_dim] of values below 2**bits -> uint8 [..., row_bytes]; field i of byte r is channel r +
    i * row_bytes.
    """
    row_bytes = plane_row_bytes(fields.shape[-1], bits)
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(fields, (0, row_bytes * per_byte - fields.shape[-1])).unflatten(
        -1, (per_byte, row_bytes)
    )
    rows = padded[..., 0, :].clone()
    for i in range(1, per_byte):
        rows |= padded[..., i, :] << (bits * i)
    return rows


def unpack_rows(rows: torch.Tensor, bits: int, head_dim: int) -> torch.Tensor:
    """Return the inverse of `pack_rows`."""
    if bits == 8:
        return rows[..., :head_dim]
    parts = [(rows >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return torch.cat(parts, dim=-1)[..., :head_dim]


def pack_words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack fields like `pack_rows`, with every word a row of its own.

    Field i of byte r of word w is number w * 32 / bits + 4 * i + r.
    """
    words, each = plane_row_bytes(fields.shape[-1], bits) // 4, 32 // bits
    padded = torch.nn.functional.pad(fields, (0, words * each - fields.shape[-1]))
    return pack_rows(padded.unflatten(-1, (words, each)), bits).flatten(-2)


def unpack_words(rows: torch.Tensor, bits: int, numbers: int) -> torch.Tensor:
    """Invert `pack_words`: uint8 [..., numbers]."""
    return unpack_rows(rows.unflatten(-1, (-1, 4)), bits, 32 // bits).flatten(-2)[..., :numbers]


def _interleave_keys(rows: torch.Tensor) -> torch.Tensor:
    tokens, row_bytes = rows.shape[-2:]
    tiles = rows.unflatten(-2, (tokens // KEY_TILE, KEY_TILE)).unflatten(-1, (row_bytes // 4, 4))
    return tiles.transpose(-3, -2).flatten(-4)


def _deinterleave_keys(stored: torch.Tensor, tokens: int, row_bytes: int) -> torch.Tensor:
    tiles = stored.unflatten(-1, (tokens // KEY_TILE, row_bytes // 4, KEY_TILE, 4))
    return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _token_order(tokens: int, device: torch.device) -> torch.Tensor:
    eights = torch.arange(0, tokens, 8, device=device)
    return (eights[:, None] + torch.tensor(VALUE_TOKEN_ORDER, device=device)).flatten()


def _value_blocks(row_bytes: int) -> list[tuple[int, int]]:
    """Return (first byte, width) of each block of a row."""
    return [(r, min(VALUE_BLOCK, row_bytes - r)) for r in range(0, row_bytes, VALUE_BLOCK)]


def _interleave_values(rows: torch.Tensor) -> torch.Tensor:
    tokens, row_bytes = rows.shape[-2:]
    quads = rows[..., _token_order(tokens, rows.device), :].unflatten(-2, (tokens // 4, 4))
    return torch.cat([quads[..., r : r + w].transpose(-1, -2).flatten(-3) for r, w in _value_blocks(row_bytes)], dim=-1)


def _deinterleave_values(stored: torch.Tensor, tokens: int, row_bytes: int) -> torch.Tensor:
    blocks = []
    for r, w in _value_blocks(row_bytes):
        block = stored[..., r * tokens : (r + w) * tokens].unflatten(-1, (tokens // 4, w, 4))
        blocks.append(block.transpose(-1, -2).flatten(-3, -2))
    rows = torch.empty(*stored.shape[:-1], tokens, row_bytes, dtype=stored.dtype, device=stored.device)
    rows[..., _token_order(tokens, stored.device), :] = torch.cat(blocks, dim=-1)
    return rows
