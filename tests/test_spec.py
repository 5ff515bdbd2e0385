"""Specs: validated at birth, round-trip as JSON and as repr, and every byte pinned by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from messages import raises

import kvbits.spec as spec_module
from kvbits.errors import KvbitsError, SpecError
from kvbits.schemes import PRESETS, fitted, get
from kvbits.spec import (
    FORMATS,
    CacheSpec,
    Copies,
    LayerGeometry,
    Override,
    PageLayout,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
    Scheme,
    Tier,
    from_dict,
    plane_row_bytes,
    to_dict,
)

CONSTRUCTORS = {
    c.__name__: c
    for c in (
        QuantSpec,
        Scheme,
        Override,
        Tier,
        Copies,
        LayerGeometry,
        CacheSpec,
        PerChannel,
        PerGroup,
        PerTensor,
        PerToken,
    )
}


@st.composite
def quant_specs(draw):
    """Any spec that is not refused."""
    if draw(st.integers(0, 9)) == 0:
        return QuantSpec.raw()
    fields = {
        "format": draw(st.sampled_from([f for f in FORMATS if f != "raw"])),
        "granularity": draw(
            st.sampled_from([PerTensor(), PerToken(), PerChannel(), PerGroup(16), PerGroup(32), PerGroup(64)])
        ),
        "symmetric": draw(st.booleans()),
        "scale_dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        "static": draw(st.booleans()),
        "center": draw(st.sampled_from([None, "channel"])),
    }
    try:
        return QuantSpec(**fields)
    except SpecError:
        assume(False)


@st.composite
def cache_specs(draw):
    num_layers = draw(st.integers(1, 4))
    override = st.builds(
        Override,
        layers=st.lists(st.integers(-num_layers, num_layers - 1), min_size=1, max_size=2).map(tuple),
        key=quant_specs(),
        value=quant_specs(),
    )
    scheme = Scheme(
        name=draw(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=8)),
        key=draw(quant_specs()),
        value=draw(quant_specs()),
        num_sink_tokens=draw(st.integers(0, 9)),
        residual_length=draw(st.integers(0, 200)),
        page_size=draw(st.sampled_from([32, 64, 96])),
        overrides=tuple(draw(st.lists(override, max_size=2))),
        source=draw(st.text(max_size=8)),
        description=draw(st.text(max_size=8)),
    )
    geometry = st.builds(
        LayerGeometry,
        num_kv_heads=st.integers(1, 8),
        head_dim=st.sampled_from([64, 128, 192, 256]),
        sliding_window=st.none() | st.integers(1, 500),
    )
    layers = draw(st.lists(geometry, min_size=num_layers, max_size=num_layers))
    return CacheSpec(
        scheme=scheme, layers=tuple(layers), raw_dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    )


# -- round trips ------------------------------------------------------------------------------------------------------


@given(cache_specs())
def test_json_round_trip_returns_an_equal_spec_and_keeps_the_description(spec):
    again = CacheSpec.from_json(spec.to_json())
    assert again == spec
    assert again.scheme.description == spec.scheme.description
    assert again.format_id == spec.format_id
    assert Scheme.from_json(spec.scheme.to_json()) == spec.scheme


@given(cache_specs())
def test_repr_is_constructor_text(spec):
    assert eval(repr(spec), dict(CONSTRUCTORS)) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips(name):
    scheme = PRESETS[name]
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert eval(repr(scheme), dict(CONSTRUCTORS)) == scheme


def test_specs_are_frozen_hashable_and_keyword_only():
    assert len({QuantSpec(), QuantSpec(), QuantSpec.raw()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantSpec().format = "int4"
    with pytest.raises(TypeError):
        QuantSpec("int4")


def test_lists_are_taken_where_tuples_are_declared():
    geometry = LayerGeometry(num_kv_heads=2, head_dim=64)
    spec = CacheSpec(scheme=PRESETS["int8"], layers=[geometry, geometry])
    assert CacheSpec.from_json(spec.to_json()) == spec
    raw = QuantSpec.raw()
    scheme = Scheme(name="x", key=raw, value=raw, overrides=[Override(layers=[0, -1], key=raw, value=raw)])
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert hash(scheme) == hash(Scheme.from_json(scheme.to_json()))


def test_json_of_another_class_is_refused_by_name():
    with raises(SpecError, "Scheme", "CacheSpec"):
        CacheSpec.from_json(PRESETS["int8"].to_json())
    with raises(SpecError, "QuantSpec", "Scheme"):
        Scheme.from_json(json.dumps(to_dict(QuantSpec())))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"type": "QuantSpecs"},
            "'QuantSpecs' PerTensor PerToken PerChannel PerGroup QuantSpec Rotary Override Tier Copies Scheme",
        ),
        ({"bits": 4}, "QuantSpec bits bands basis center format"),
        ({"format": "int5"}, "'int5' int8 int4 int3 int2 fp8_e4m3 fp8_e5m2 nuq4 nuq3 nuq2 trellis raw"),
    ],
)
def test_json_with_unknown_names_lists_the_known_ones(change, parts):
    with raises(SpecError, *parts.split()):
        from_dict(to_dict(QuantSpec()) | change)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        "7",
        '{"type": "CacheSpec"}',
        '{"type": "Scheme", "name": "x"}',
        '{"type": ["QuantSpec"]}',
        "[" * 100_000,
    ]
    + [f'{{"type": "{name}", "format": "raw"}}' for name in ("Scheme", "PerTensor")],
    ids=lambda text: text[:40],
)
def test_text_that_is_no_spec_is_a_spec_error(text):
    with pytest.raises(SpecError):
        CacheSpec.from_json(text)
    with pytest.raises(SpecError):
        Scheme.from_json(text)


# -- refusals ---------------------------------------------------------------------------------------------------------

RAW = QuantSpec.raw()
GEOMETRY = LayerGeometry(num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: QuantSpec(format="int5"), ["'int5'", "int8", "int4", "int3", "int2"]),
        (lambda: QuantSpec(scale_dtype="int8"), ["'int8'", "float16", "bfloat16", "float32"]),
        (lambda: QuantSpec(center="token"), ["'token'", None, "channel"]),
        (lambda: QuantSpec(granularity="PerToken"), ["'PerToken'", "PerTensor", "PerToken", "PerChannel", "PerGroup"]),
        (lambda: QuantSpec(granularity=PerGroup), ["PerGroup", "PerTensor", "PerToken", "PerChannel"]),
        (lambda: QuantSpec(format="fp8_e4m3", symmetric=False), ["fp8_e4m3", "symmetric=True"]),
        (lambda: QuantSpec(format="raw"), ["QuantSpec.raw()"]),
        (lambda: QuantSpec(granularity=PerTensor()), ["static=True"]),
        (lambda: QuantSpec(granularity=PerToken(), static=True), ["per-token", "PerGroup(size)", "PerChannel()"]),
        (lambda: QuantSpec(static=True, center="channel"), ["symmetric=False"]),
        (lambda: QuantSpec(granularity=PerChannel(), symmetric=False, center="channel"), ["center"]),
        (lambda: PerGroup(0), ["size=0", "from 2", 32, 64, 128]),
        # kernels take one channel for PerChannel(), whose scales lie elsewhere
        (lambda: PerGroup(1), ["size=1", "from 2"]),
        (lambda: PerGroup(-8), ["size=-8", "from 2"]),
        (lambda: PerGroup(32.0), ["size=32.0", "whole number"]),
        (lambda: QuantSpec().num_groups(80), ["head_dim=80", "group_size=64", "group_size=16", "per-token"]),
        (lambda: QuantSpec().num_groups(72), ["head_dim=72", "group_size=64", "per-token"]),
        (
            lambda: Scheme(name="x", key=PRESETS["klt4"].key, value=PRESETS["nuq4"].value),
            ["nuq4 values", "trellis", "integer"],
        ),
        (
            lambda: Override(layers=(0,), key=PRESETS["klt4"].key, value=QuantSpec(outliers=0.01)),
            ["int8 values with outliers=0.01"],
        ),
        *(
            (lambda name=name: get("klt2", **{name: None}), [f"{name}=None", "tuple", kind, f"{name}=()"])
            for name, kind in (("copies", "Copies"), ("tiers", "Tier"), ("overrides", "Override"))
        ),
        (lambda: Scheme(name="a/b", key=RAW, value=RAW), ["name='a/b'", "'/'", "'mine'"]),
        (lambda: Scheme(name="a\0b", key=RAW, value=RAW), [r"name='a\x00b'", "zero bytes"]),
        (
            lambda: Scheme(name="x", key=RAW, value=RAW, page_size=0),
            ["page_size=0", "from 32", "multiple of 32", 64, 128],
        ),
        (lambda: Scheme(name="x", key=RAW, value=RAW, page_size=-64), ["page_size=-64", "from 32", "multiple of 32"]),
        (lambda: Scheme(name="x", key=RAW, value=RAW, page_size=48), ["page_size=48", "multiple of 32"]),
        (lambda: Scheme(name="x", key=RAW, value=RAW, page_size=64.0), ["page_size=64.0", "multiple of 32"]),
        (
            lambda: Scheme(name="x", key=RAW, value=RAW, num_sink_tokens=-1),
            ["num_sink_tokens=-1", "from 0"],
        ),
        (
            lambda: Scheme(name="x", key=RAW, value=RAW, residual_length=-5),
            ["residual_length=-5", "from 0"],
        ),
        (lambda: LayerGeometry(num_kv_heads=0, head_dim=64), ["num_kv_heads=0", "from 1"]),
        (lambda: LayerGeometry(num_kv_heads=1, head_dim=0), ["head_dim=0", "multiple of 8"]),
        (lambda: LayerGeometry(num_kv_heads=1, head_dim=100), ["head_dim=100", "multiple of 8"]),
        (lambda: LayerGeometry(num_kv_heads=1, head_dim=64, sliding_window=0), ["sliding_window=0", "from 1", "None"]),
        (lambda: CacheSpec(scheme=PRESETS["int8"], layers=()), ["layer"]),
        (
            lambda: CacheSpec(scheme=PRESETS["int8"], layers=(GEOMETRY,), raw_dtype="float64"),
            ["'float64'", "float16", "bfloat16", "float32"],
        ),
        (
            lambda: CacheSpec(scheme=PRESETS["int8"], layers=(LayerGeometry(num_kv_heads=2, head_dim=80),)),
            ["head_dim=80", "group_size=64", "group_size=16"],
        ),
        (
            lambda: CacheSpec(
                scheme=dataclasses.replace(PRESETS["int8"], overrides=(Override(layers=(2,), key=RAW, value=RAW),)),
                layers=(GEOMETRY,) * 2,
            ),
            ["layer 2", "2 layers"],
        ),
        (lambda: CacheSpec(scheme=PRESETS["int8"], layers=(GEOMETRY,)).nbytes(-1), ["num_tokens=-1", "negative"]),
        (lambda: CacheSpec(scheme=PRESETS["int8"], layers=(GEOMETRY,)).nbytes(10, -1), ["batch_size=-1", "negative"]),
    ],
)
def test_refusals_name_the_value_the_limit_and_the_way_out(make, parts):
    with raises(SpecError, *parts) as refusal:
        make()
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, KvbitsError)


@pytest.mark.parametrize("bad", [math.nan, math.inf, True, 64.5, 64.0, "64", [64], 2**64, 10**30, -64], ids=repr)
@pytest.mark.parametrize(
    "field",
    [
        "num_kv_heads",
        "head_dim",
        "sliding_window",
        "page_size",
        "num_sink_tokens",
        "residual_length",
        "num_tokens",
        "PerGroup size",
    ],
)
def test_sizes_are_whole_numbers_within_limits(field, bad):
    """An invalid size would be stored, or counted through, before anybody notices."""
    with raises(SpecError, f"{field}={bad!r}", "whole number"):
        if field in ("num_kv_heads", "head_dim", "sliding_window"):
            LayerGeometry(**{"num_kv_heads": 2, "head_dim": 64} | {field: bad})
        elif field == "num_tokens":
            Tier(num_tokens=bad)
        elif field == "PerGroup size":
            PerGroup(bad)
        else:
            Scheme(name="x", key=RAW, value=RAW, **{field: bad})


@pytest.mark.parametrize("bad", [-1, 2.0, True, None, "x", (), PerToken()], ids=repr)
def test_specs_and_overrides_are_what_they_must_be(bad):
    """As they come from a file that somebody wrote by hand."""
    for make in (Scheme, Override):
        for field in ("key", "value"):
            with raises(SpecError, f"{field}={bad!r}", "QuantSpec(format=..)"):
                make(**({"name": "x"} if make is Scheme else {"layers": (0,)}) | {"key": RAW, "value": RAW, field: bad})
    with raises(SpecError, "overrides", repr(bad), "Override(layers=(0,), key=.., value=..)"):
        Scheme(name="x", key=RAW, value=RAW, overrides=(bad,))


def test_overrides_of_nothing_are_refused():
    with raises(SpecError, "layers=()"):
        Override(layers=(), key=RAW, value=RAW)


def test_a_tier_stores_8_bits_unless_it_says_something_else():
    key, value = PRESETS["tiered"].key, PRESETS["tiered"].value
    eight = tuple(dataclasses.replace(s, format="int8") for s in (key, value))
    assert Tier(num_tokens=64).specs(key, value) == eight
    assert Tier(num_tokens=64, value=value).specs(key, value) == (eight[0], value)
    (group,) = CacheSpec(scheme=PRESETS["tiered"], layers=(LayerGeometry(num_kv_heads=2, head_dim=64),)).groups
    assert (group.layouts["tier0"].key, group.layouts["tier0"].value) == eight


@pytest.mark.parametrize(
    ("name", "tier", "parts"),
    [
        ("tiered", Tier(num_tokens=65), ("65 tokens", "pages of 64", "num_tokens=64")),
        ("int8", Tier(num_tokens=64), ("tier", "format='int8'", "older")),
        ("klt2", Tier(num_tokens=64), ("trellis", "Tier(.., key=QuantSpec(format='int8'))")),
        ("int4", Tier(num_tokens=64, key=PRESETS["klt4"].key), ("format='trellis'", "calibration")),
        ("int4", Tier(num_tokens=64, key=RAW, value=RAW), ("raw", "residual_length")),
        ("int4", Tier(num_tokens=64, key=8), ("key=8", "QuantSpec(format=..)")),
        ("int4", 64, (64, "Tier(num_tokens=..)")),
    ],
)
def test_tiers_that_cannot_be_say_what_can(name, tier, parts):
    with raises(SpecError, *parts):
        dataclasses.replace(PRESETS[name], page_size=64, residual_length=0, tiers=(tier,))


INT8, KLT4 = PRESETS["int8"], PRESETS["klt4"]


@pytest.mark.parametrize(
    ("name", "copies", "changes", "parts"),
    [
        (
            "int4",
            (Copies(num_tokens=65, key=INT8.key, value=INT8.value),),
            {},
            ("65 tokens", "pages of 64", "num_tokens=64"),
        ),
        (
            "int4",
            (Copies(num_tokens=64, key=KLT4.key, value=INT8.value),),
            {},
            ("format='trellis'", "calibration", "basis", "mean"),
        ),
        ("int8", (Copies(num_tokens=64, key=INT8.key, value=INT8.value),), {}, ("copies", "format='int8'", "older")),
        (
            "int4",
            (Copies(num_tokens=64, key=INT8.key, value=INT8.value),) * 2,
            {},
            ("copies", "format='int8'", "older"),
        ),
        ("int4", (64,), {}, (64, "Copies(num_tokens=.., key=.., value=..)")),
        ("tiered", (Copies(num_tokens=64, key=INT8.key, value=INT8.value),), {}, ("tiers=()", "copies=()")),
        ("klt2", PRESETS["klt2"].copies, {"token_local": True}, ("token_local=True", "copies=()")),
        ("klt2", PRESETS["klt2"].copies, {"page_size": 128}, ("448 tokens", "pages of 128", "num_tokens=512")),
    ],
)
def test_copies_that_cannot_be_say_what_can(name, copies, changes, parts):
    with raises(SpecError, *parts):
        dataclasses.replace(PRESETS[name], **{"residual_length": 0, "copies": copies} | changes)


@pytest.mark.parametrize(
    ("num_tokens", "key", "parts"),
    [(0, INT8.key, ("num_tokens=0", 1)), (64, RAW, ("residual_length",)), (64, 8, ("key=8", "QuantSpec(format=..)"))],
)
def test_copies_of_nothing_are_refused(num_tokens, key, parts):
    with raises(SpecError, *parts):
        Copies(num_tokens=num_tokens, key=key, value=RAW)


def test_a_scheme_without_copies_does_not_name_them():
    assert "copies" not in to_dict(KLT4)
    assert Scheme.from_json(PRESETS["klt2"].to_json()).copies == PRESETS["klt2"].copies


def test_copies_of_wide_heads_have_the_widths_of_klt4_there():
    wide = fitted(PRESETS["klt2"], 256)
    assert wide.copies[0].key == fitted(KLT4, 256).key != KLT4.key


def test_a_tier_of_an_older_kvbits_is_refused_with_what_to_write():
    text = PRESETS["tiered"].to_json().replace('"key": null, "value": null', '"key_bits": 4, "value_bits": 4')
    with raises(SpecError, "key_bits", "value_bits"):
        Scheme.from_json(text)


def test_a_scheme_file_from_before_levels_is_whole():
    """Its sum is over the fields that it has."""
    spec = {"type": "QuantSpec", "format": "int8", "granularity": {"type": "PerGroup", "size": 64}, "symmetric": True}
    spec |= {"scale_dtype": "float16", "static": False, "center": "channel", "outliers": 0.0, "pre_rope": False}
    spec |= {"basis": None, "bands": []}
    text = {"type": "Scheme", "name": "int8_centered", "key": spec, "value": spec | {"center": None}}
    text |= {"num_sink_tokens": 0, "residual_length": 0, "page_size": 64, "tiers": [], "token_local": False}
    text |= {"overrides": [], "source": "https://arxiv.org/abs/2410.02367", "sum": "5a0231be8b1d85fb"}
    text |= {
        "description": "int8 with each page's channel means of the keys kept apart: the safe choice, key bias or not"
    }
    assert Scheme.from_json(json.dumps(text)) == PRESETS["int8_centered"]


def test_banded_codes_of_an_older_kvbits_are_refused_with_what_to_take():
    text = PRESETS["klt2"].to_json().replace('"trellis"', '"banded"')
    with raises(SpecError, "'banded'", "klt4", "klt3", "klt2", "kvbits fit"):
        Scheme.from_json(text)


def test_numpy_s_whole_numbers_become_plain_ones():
    geometry = LayerGeometry(num_kv_heads=np.int64(2), head_dim=np.int32(64), sliding_window=np.uint8(9))
    assert geometry == LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=9)
    spec = CacheSpec(scheme=PRESETS["int8"], layers=(geometry,))
    assert CacheSpec.from_json(spec.to_json()) == spec


# -- bytes, pinned by hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "bits", "row_bytes"),
    [
        *(
            (64, 8, 64),
            (80, 8, 80),
            (128, 8, 128),
            (64, 4, 32),
            (80, 4, 40),
            (128, 4, 64),
            (64, 2, 16),
            (80, 2, 20),
            (128, 2, 32),
        ),
        *(
            (64, 1, 8),
            (80, 1, 12),
            (128, 1, 16),
            (8, 4, 4),
            (8, 2, 4),
            (8, 1, 4),
            (96, 1, 12),
            (256, 2, 64),
            (40, 4, 20),
            (72, 4, 36),
            (72, 2, 20),
        ),
    ],
)
def test_plane_rows_are_whole_words(head_dim, bits, row_bytes):
    assert plane_row_bytes(head_dim, bits) == row_bytes


def spec(fmt, granularity, **more):
    return QuantSpec(format=fmt, granularity=granularity, **more)


@pytest.mark.parametrize(
    ("key", "value", "page_size", "head_dim", "head_bytes"),
    [
        # codes of K + codes of V + parameters of K + parameters of V, padded to 64
        (QuantSpec(), QuantSpec(), 64, 64, 4096 + 4096 + 128 + 128),
        (QuantSpec(), QuantSpec(), 64, 128, 8192 + 8192 + 256 + 256),
        (QuantSpec(), QuantSpec(), 128, 256, 2 * 128 * 256 + 2 * 4 * 128 * 2),
        (spec("int8", PerToken()), spec("int8", PerToken()), 64, 80, 5120 + 5120 + 128 + 128),
        (spec("int4", PerToken()), spec("int4", PerToken()), 64, 80, 2560 + 2560 + 128 + 128),
        (spec("int3", PerToken()), spec("int3", PerToken()), 64, 80, 64 * 32 * 2 + 128 + 128),
        (spec("int3", PerToken()), spec("int3", PerToken()), 64, 64, 64 * 24 * 2 + 128 + 128),
        (spec("int2", PerToken()), spec("int2", PerToken()), 64, 80, 64 * 20 * 2 + 128 + 128),
        (spec("int4", PerGroup(32)), spec("int4", PerGroup(32)), 64, 256, 8192 + 8192 + 8 * 64 * 2 * 2),
        (
            spec("int2", PerChannel(), symmetric=False),
            spec("int2", PerGroup(32), symmetric=False),
            32,
            96,
            32 * 24 * 2 + 4 * 192,
        ),
        (spec("int2", PerChannel()), spec("int2", PerChannel()), 32, 8, 128 + 128 + 16 + 16 + 32),
        (spec("fp8_e5m2", PerToken()), spec("fp8_e4m3", PerTensor(), static=True), 64, 96, 6144 + 6144 + 128),
        (QuantSpec(static=True), QuantSpec(static=True, symmetric=False), 64, 128, 8192 + 8192),
        (spec("int4", PerGroup(32), center="channel"), spec("int4", PerToken()), 64, 64, 2048 + 2048 + 256 + 128 + 128),
        (spec("int8", PerChannel(), scale_dtype="float32"), QuantSpec.raw(), 64, 80, 5120 + 64 * 80 * 2 + 320 + 0),
        (QuantSpec.raw(), QuantSpec.raw(), 64, 80, 2 * 64 * 80 * 2),
    ],
)
def test_head_struct_bytes_match_hand_arithmetic(key, value, page_size, head_dim, head_bytes):
    layout = PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=3, head_dim=head_dim)
    padded = -(-head_bytes // 64) * 64
    assert layout.head_bytes == padded
    assert layout.page_size_bytes == 3 * padded
    assert layout.bits_per_element == 8 * padded / (2 * page_size * head_dim)
    assert sum(layout.bytes_by_kind().values()) == layout.page_size_bytes


def test_offsets_of_a_page_with_every_section_are_pinned():
    key = spec("int3", PerGroup(40), symmetric=False, center="channel")
    value = spec("int4", PerToken(), symmetric=False, scale_dtype="float32", center="channel")
    layout = PageLayout(key=key, value=value, page_size=32, num_kv_heads=1, head_dim=80)
    assert {n: (s.offset, s.nbytes, s.dtype, s.shape) for n, s in layout.sections.items()} == {
        "k_plane0": (0, 640, "uint8", (32, 20)),
        "k_plane1": (640, 384, "uint8", (32, 12)),
        "v_plane0": (1024, 1280, "uint8", (32, 40)),
        "k_scale": (2304, 128, "float16", (2, 32)),
        "k_bias": (2432, 128, "float16", (2, 32)),
        "k_mean": (2560, 160, "float16", (80,)),
        "v_scale": (2720, 128, "float32", (1, 32)),
        "v_bias": (2848, 128, "float32", (1, 32)),
        "v_mean": (2976, 320, "float32", (80,)),
    }
    assert layout.head_bytes == 3328  # 3296 padded to 64
    assert layout.bytes_by_kind() == {"codes": 2304, "scales": 992, "outliers": 0, "raw": 0, "padding": 32}


@given(quant_specs(), quant_specs(), st.sampled_from([32, 64, 128]), st.sampled_from([8, 64, 80, 96, 128, 192, 256]))
def test_sections_are_aligned_in_order_and_never_overlap(key, value, page_size, head_dim):
    layout = PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=2, head_dim=head_dim)
    try:
        sections = list(layout.sections.values())
    except SpecError:
        return  # the group does not divide head_dim
    end = 0
    for s in sections:
        assert s.offset % 16 == 0
        assert end <= s.offset < end + 16
        end = s.offset + s.nbytes
    assert end <= layout.head_bytes < end + 64
    assert layout.head_bytes % 64 == 0


def test_formats_version_is_part_of_the_format_id():
    assert CacheSpec(scheme=PRESETS["int8"], layers=(GEOMETRY,)).format_id.startswith(
        f"kvbits-{spec_module.FORMATS_VERSION}:"
    )


# -- groups and totals ------------------------------------------------------------------------------------------------


def test_equal_layers_share_a_group_and_overrides_split_it():
    full, sliding = GEOMETRY, LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=32)
    scheme = dataclasses.replace(PRESETS["int4"], overrides=(Override(layers=(0, -1), key=RAW, value=RAW),))
    made = CacheSpec(scheme=scheme, layers=(full, sliding, full, sliding, full, full))
    assert [(g.layers, g.is_raw, g.geometry.sliding_window) for g in made.groups] == [
        ((0, 5), True, None),
        ((1, 3), False, 32),
        ((2, 4), False, None),
    ]


def test_the_last_matching_override_wins():
    first = Override(layers=(0, 1), key=RAW, value=RAW)
    second = Override(layers=(-1,), key=QuantSpec(format="int4"), value=RAW)
    scheme = dataclasses.replace(PRESETS["int8"], overrides=(first, second))
    assert scheme.for_layer(0, 2) == (RAW, RAW)
    assert scheme.for_layer(1, 2) == (QuantSpec(format="int4"), RAW)
    assert scheme.for_layer(2, 4) == (PRESETS["int8"].key, PRESETS["int8"].value)


def test_total_bytes_match_hand_arithmetic_with_sinks_tail_and_window():
    full = LayerGeometry(num_kv_heads=8, head_dim=128)
    sliding = LayerGeometry(num_kv_heads=4, head_dim=64, sliding_window=200)
    scheme = dataclasses.replace(PRESETS["int8"], num_sink_tokens=4, residual_length=100)
    made = CacheSpec(scheme=scheme, layers=(full, full, sliding))
    # full: (1000 - 4 - 100 - 1) // 64 = 13 closed pages, ceil(164 / 64) = 3 tail pages, one sink page of 4 tokens
    full_bytes = 2 * 8 * (13 * 16896 + 3 * 64 * 128 * 4 + 4 * 128 * 4)
    # sliding: closed pages are older than the residual of 100 tokens; the window of 200 reaches over 99 of their
    # tokens, in 2 or 3 pages
    sliding_bytes = 4 * (made.groups[1].pages_for(1000)["closed"] * 8448 + 3 * 64 * 64 * 4 + 4 * 64 * 4)
    assert made.groups[0].pages_for(1000) == {"sink": 1, "closed": 13, "tail": 3}
    assert made.groups[1].pages_for(1000)["closed"] in (2, 3)
    assert made.nbytes(1000) == full_bytes + sliding_bytes
    assert made.nbytes(1000, batch_size=3) == 3 * (full_bytes + sliding_bytes)


def test_no_tokens_need_no_bytes():
    assert CacheSpec(scheme=PRESETS["int4"], layers=(GEOMETRY,)).nbytes(0) == 0


@given(st.sampled_from(list(PRESETS)), st.integers(0, 600), st.integers(0, 600), st.none() | st.integers(1, 300))
def test_bytes_never_shrink_with_more_tokens(name, a, b, window):
    made = CacheSpec(scheme=PRESETS[name], layers=(LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=window),))
    assert made.nbytes(min(a, b)) <= made.nbytes(max(a, b))


def test_bytes_per_token_is_the_slope_of_total_bytes():
    made = CacheSpec(scheme=PRESETS["int4"], layers=(LayerGeometry(num_kv_heads=8, head_dim=128),) * 3)
    assert made.nbytes(64 * 1001 + 1) - made.nbytes(64 + 1) == 64 * 1000 * made.bytes_per_token
    assert made.bytes_per_token == 3 * 8 * 9216 / 64


def test_stock_bytes_count_the_window_the_stock_cache_keeps():
    sliding = LayerGeometry(num_kv_heads=2, head_dim=64, sliding_window=32)
    made = CacheSpec(scheme=PRESETS["int8"], layers=(GEOMETRY, sliding))
    assert made.raw_nbytes(1000) == 2 * 2 * 64 * 2 * (1000 + 31)
    assert made.raw_nbytes(1000, batch_size=2, bytes_per_element=4) == 4 * made.raw_nbytes(1000)


@pytest.mark.parametrize("rotary", [1, "llama", [1.0], {"base": 10_000.0}])
def test_a_rotary_that_is_none_is_refused(rotary):
    with raises(SpecError, "Rotary"):
        LayerGeometry(num_kv_heads=2, head_dim=64, rotary=rotary)
