"""Presets: documented, with the bits per element their tables promise."""

import dataclasses

import pytest
from messages import raises

from kvbits import schemes
from kvbits.errors import SpecError
from kvbits.schemes import PRESETS
from kvbits.spec import CacheSpec, LayerGeometry, QuantSpec, Scheme, Tier

BITS = {  # head_dim 128, counted by hand from docs/reference/formats.md: codes + scales + biases + means
    "raw": 16,
    "int8": 8 + 16 / 64,
    "int8_per_channel": 8 + 32 / 64,
    "int8_per_token": 8 + 16 / 128,
    "int8_asym": 8 + 32 / 128,
    "int8_centered": 8 + 16 / 64 + 16 / 64 / 2,
    "int8_static": 8,
    "fp8": 8 + 16 / 128,
    "fp8_e5m2_keys": 8 + 16 / 128,
    "int4": 4 + 16 / 32,
    "int4_centered": 4 + 32 / 32 + 16 / 64 / 2,
    "int8k_int4v": (8 + 16 / 64 + 4 + 16 / 32) / 2,
    "kivi4": 4 + 32 / 32,
    "kivi2": 2 + 32 / 32,
    **{f"nuq{bits}": bits + (32 / 64 + 32 / 128) / 2 for bits in (4, 3, 2)},
    # 82 of a page's 64 x 128 numbers are listed: their indices and values, 164 bytes each, end at multiples of 16
    **{f"nuq{bits}-1%": bits + (32 / 64 + 32 / 128) / 2 + 2 * 176 * 8 / (64 * 128) for bits in (4, 3, 2)},
    # keys: 36, 28 or 20 bits for each 8 channels of the bands, a mean in 16 bits over 64 tokens; both sides a scale of
    # 8 bits per token
    **{f"klt{bits}": (bits + 0.5 + 16 / 64 + bits) / 2 + 8 / 128 for bits in (4, 3, 2)},
    "tiered": 4 + (32 / 64 + 32 / 128) / 2,  # the oldest tier
    "tiered_8k": 4 + (32 / 64 + 32 / 128) / 2,
}


def test_every_preset_has_hand_counted_bits():
    assert set(BITS) == set(PRESETS)


@pytest.mark.parametrize("name", BITS)
def test_bits_per_element_are_as_counted_by_hand(name):
    assert PRESETS[name].bits_per_element(128) == BITS[name]
    spec = CacheSpec(scheme=PRESETS[name], layers=(LayerGeometry(num_kv_heads=8, head_dim=128),) * 2)
    assert spec.bits_per_element == BITS[name]
    assert spec.bytes_per_token == 2 * 8 * 128 * 2 * BITS[name] / 8


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_named_described_and_fit_common_heads(name):
    scheme = PRESETS[name]
    assert scheme.name == name
    assert scheme.description
    assert scheme.source == "" or scheme.source.startswith("https://")
    for head_dim in (64, 128, 256):
        CacheSpec(scheme=scheme, layers=(LayerGeometry(num_kv_heads=1, head_dim=head_dim),))


@pytest.mark.parametrize(
    "name", ["int8_per_channel", "kivi4", "kivi2", "int8_centered", "int4_centered", "fp8", "fp8_e5m2_keys", "int4"]
)
def test_published_methods_link_their_paper(name):
    assert PRESETS[name].source.startswith("https://")


def test_get_returns_the_preset_or_a_changed_copy():
    assert schemes.get("int4") == PRESETS["int4"]
    changed = schemes.get("int4", num_sink_tokens=4, value=QuantSpec.raw())
    assert (changed.num_sink_tokens, changed.value.is_raw, changed.key) == (4, True, PRESETS["int4"].key)
    assert PRESETS["int4"].num_sink_tokens == 0


def test_unknown_names_list_the_known_ones():
    with raises(SpecError, "'int5'", "int8", "int4", "raw", "int8_centered"):
        schemes.get("int5")
    with raises(SpecError, "residual", "residual_length"):
        schemes.get("int4", residual=3)
    with raises(SpecError, "None", "int8", "int4"):
        schemes.get(None)


def test_changed_fields_are_validated():
    with raises(SpecError, "page_size=20", 32, 65536, 64, 128):
        schemes.get("int4", page_size=20)


def test_only_static_and_codebook_presets_need_calibration():
    wanted = [
        n
        for n, s in PRESETS.items()
        if any(x.static or x.format.startswith("nuq") or x.basis == "calibrated" for x in (s.key, s.value))
    ]
    assert [n for n, s in PRESETS.items() if s.needs_calibration] == wanted
    assert PRESETS["int8_static"].needs_calibration and PRESETS["nuq4-1%"].needs_calibration


def test_a_list_of_schemes_is_expanded_in_order_each_once(tmp_path):
    mine = dataclasses.replace(PRESETS["int4"], name="mine", num_sink_tokens=4)
    path = tmp_path / "any.json"
    path.write_text(mine.to_json())
    assert schemes.expand(["kivi2", "all", str(path), mine]) == ["kivi2", *(n for n in PRESETS if n != "kivi2"), mine]
    assert schemes.expand(["few", "int4"], {"few": ["int8", "int4"]}) == ["int8", "int4"]
    assert schemes.find(str(path)) == mine and schemes.find("int4") == "int4"


@pytest.mark.parametrize("name", ["int4", "", ".."])
def test_a_scheme_of_ones_own_needs_a_name_that_results_can_go_by(name):
    with raises(SpecError, repr(name)):
        schemes.expand([dataclasses.replace(PRESETS["int4"], name=name)])


def test_names_and_files_that_are_no_schemes(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    mine, other = (dataclasses.replace(PRESETS["int4"], name="mine", num_sink_tokens=n) for n in (1, 2))
    for names in (["int5"], [str(tmp_path / "bad.json")], [str(tmp_path / "none.json")], [mine, other]):
        with pytest.raises(SpecError):
            schemes.expand(names)


@pytest.mark.parametrize("budget", [0.35, 0.45, 0.5])
def test_tiers_fill_a_byte_budget(budget):
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 3
    scheme = schemes.get("tiered_8k")
    full = CacheSpec(scheme=scheme, layers=layers).raw_nbytes(8192)
    sized = schemes.within(scheme, layers, int(budget * full), context=8192)
    taken = CacheSpec(scheme=sized, layers=layers).nbytes(8192)
    (tier,) = sized.tiers
    page_more = dataclasses.replace(sized, tiers=(Tier(num_tokens=tier.num_tokens + 64),))
    assert taken <= int(budget * full)
    assert CacheSpec(scheme=page_more, layers=layers).nbytes(8192) > int(budget * full) or tier.num_tokens >= 7600
    with raises(SpecError, full // 10, "residual_length", "context"):
        schemes.within(scheme, layers, full // 10, context=8192)
    with raises(SpecError, "'int4'", "'tiered'"):
        schemes.within(schemes.get("int4"), layers, full, context=8192)


def test_files_and_names_of_rotated_integers_say_what_to_take_instead():
    with raises(SpecError, "'int4_rotated'", "klt4"):
        schemes.get("int4_rotated")
    key = PRESETS["int4"].to_json().split('"key": ')[1].split(', "value"')[0]
    for old, new in (('"basis": null', '"basis": "hadamard"'), ('"basis": null', '"basis": null, "rotated": true')):
        assert old in key
        with raises(SpecError, "klt4"):
            Scheme.from_json(PRESETS["int4"].to_json().replace(key, key.replace(old, new), 1))
