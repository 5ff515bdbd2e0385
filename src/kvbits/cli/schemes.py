"""`kvbits schemes`: the presets, the core's first."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import setting
from .common import Output, command, new_table, print_json
from .output import show


@dataclass(frozen=True, kw_only=True)
class Listed(Output):
    """Options of `kvbits schemes`: what is listed."""

    head_dim: int = setting(128, "Channels per head of your model. Scales cost more bits in narrow heads.")


@command("schemes")
def list_schemes(options: Listed) -> None:
    """Print the named schemes with bits per element, description and paper link.

    Bits include scales, offsets and padding.
    """
    from .. import schemes
    from ..spec import LayerGeometry, to_dict

    head_dim = options.head_dim
    LayerGeometry(num_kv_heads=1, head_dim=head_dim)  # refuses a head_dim that no cache has
    found = [
        (s, s.bits_per_element(head_dim)) for s in (schemes.get(name, head_dim=head_dim) for name in schemes.PRESETS)
    ]
    if options.as_json:
        rows = [
            {
                "scheme": s.name,
                "ring": "core" if s.name in schemes.CORE else "literature",
                "bits_per_element": bits,
                "description": s.description,
                "source": s.source,
                "page_size": s.page_size,
                "num_sink_tokens": s.num_sink_tokens,
                "residual_length": s.residual_length,
                "copies": to_dict(s.copies),
                "needs_calibration": s.needs_calibration,
                "key": to_dict(s.key),
                "value": to_dict(s.value),
            }
            for s, bits in found
        ]
        print_json({"head_dim": head_dim, "rows": rows})
        return
    tables = {
        True: f"Schemes at head_dim {head_dim}",
        False: "Literature: formats of papers and their neighbours, kept to compare with",
    }
    shown = {
        core: new_table(title, "scheme", "bits/element", "newest raw", "page", "description", "source")
        for core, title in tables.items()
    }
    for table in shown.values():
        for column in table.columns[4:]:
            column.justify = "left"
    for s, bits in found:
        shown[s.name in schemes.CORE].add_row(
            s.name, f"{bits:.3f}", f"{s.residual_length}", f"{s.page_size}", s.description, s.source
        )
    notes = [
        (
            f"bits/element: closed pages in heads of {head_dim} channels (--head-dim for other models), all metadata"
            " included."
        ),
        (
            "newest raw: tokens always kept at 16 bits; besides them the unfinished page is, so with 0 still up to"
            " `page` tokens."
        ),
    ]
    show(*shown.values(), "\n".join(notes))
