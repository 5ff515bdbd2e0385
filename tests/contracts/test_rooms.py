"""Families of formats are rooms: what is shared names none, and no room enters another's."""

import re
import sys
from pathlib import Path

import pytest

import kvbits
from kvbits import schemes
from kvbits.ops.cuda.families import families

ROOT = Path(kvbits.__file__).parent
WORDS = re.compile(r"(?i)banded|trellis|klt|codebook|nuq|kvquant")
SHARED = sorted(
    path
    for folder, kinds in (
        ("ops", ("*.py",)),
        ("ops/cuda/engine", ("**/*.py", "**/*.cu*")),
        ("cache", ("**/*.py",)),
        ("integrations", ("**/*.py",)),
    )
    for kind in kinds
    for path in (ROOT / folder).glob(kind)
)
EXCEPTIONS = {
    "ops/descriptor.py": "says what every format's bytes are",
    "ops/static.py": "names and shapes of what is calibrated",
    "integrations/engine/served.py": "the presets that vLLM has dtypes of",
    "integrations/prompts.py": "fields of Transformers' configurations, of audio codebooks too",
    "integrations/vllm/formats.py": "the dtypes' tags",
    "integrations/vllm/observe.py": "the presets whose basis is measured",
    "integrations/vllm/scheme_file.py": "a refusal that says what a spec may not have",
    "integrations/vllm/releases.py": "a class of vLLM's is called so",
}
QUESTIONS = re.compile(r"""is_trellis|has_codebook|basis [!=]= ["'](klt|calibrated)["']""")
"""Ways in which Python asks which family a format is of.

Before there were rooms it was asked 114 times outside spec, quant and families: by these words and by four functions
that are gone.
"""
MOST_QUESTIONS = 10
ROOMS = [
    *sorted(p.parent for p in (ROOT / "ops/cuda/families").glob("*/__init__.py")),
    *sorted(p.parent for p in (ROOT / "literature").glob("*/family.py")),
]
ENTERS = {"klt": {"plain"}, "kvquant": {"plain"}, "raw": {"plain"}}
"""Rooms that a family may enter."""


@pytest.mark.parametrize("path", SHARED, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_shared_names_no_family(path):
    if (name := str(path.relative_to(ROOT))) in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name])
    found = [line.strip() for line in path.read_text().splitlines() if WORDS.search(line)]
    assert not found, f"{name} names a family: {found}"


def test_few_ask_which_family_a_format_is_of():
    found = []
    for path in ROOT.rglob("*.py"):
        if not {"spec", "quant", "families", "literature"} & set(path.relative_to(ROOT).parts):
            found += [
                f"{path.relative_to(ROOT)}: {line.strip()}"
                for line in path.read_text().splitlines()
                for _ in QUESTIONS.finditer(line)
            ]
    assert len(found) <= MOST_QUESTIONS, "\n".join(found)


def test_exceptions_are_few_and_needed():
    assert len(EXCEPTIONS) <= 10
    assert all(WORDS.search((ROOT / name).read_text()) for name in EXCEPTIONS), (
        "an exception that names no family any more"
    )


def test_operations_find_families_of_the_literature_through_the_registry_alone():
    """Every room of the literature is registered, its layouts find it, and `ops` does not name the package."""
    registered = {sys.modules[type(f).__module__].__package__ for f in families()}
    outside = {f"kvbits.literature.{room.name}" for room in ROOMS if "literature" in room.parts}
    assert outside and {name for name in registered if ".ops." not in name} == outside
    assert set(schemes.FAMILIES) == {f"{name}.family" for name in outside}
    sources = (p for kind in ("py", "h", "cpp", "cu", "cuh") for p in (ROOT / "ops").rglob(f"*.{kind}"))
    assert not [p for p in sources if "literature" in p.read_text()]


@pytest.mark.parametrize("room", ROOMS, ids=lambda p: p.name)
def test_a_family_enters_no_other_s_room(room):
    owner = {p.name: p.parent.name for r in ROOMS for p in r.glob("*.cu*")}
    entered = set()
    for path in room.iterdir():
        if path.suffix in (".cu", ".cuh"):
            entered |= {owner[h] for h in re.findall(r'#include "([^"]+)"', path.read_text()) if h in owner}
        elif path.suffix == ".py":
            entered |= {name for name in re.findall(r"^\s*from \.\.(\w+)", path.read_text(), re.MULTILINE)}
            entered |= {name for name in re.findall(r"families\.(\w+)", path.read_text())}
    assert entered - {room.name} <= ENTERS.get(room.name, set())


def test_headers_of_all_rooms_have_names_of_their_own():
    """Headers are found by name: a kernel's own folder, then `compile.FOLDERS`."""
    names = [p.name for folder in ("ops/cuda", "literature") for p in (ROOT / folder).rglob("*.cuh")]
    assert len(names) == len(set(names))


def test_rooms_of_the_cpu_enter_the_engine_and_plain_alone():
    """Only the files of a tier, which put everything together, include families from the engine."""
    for path in (ROOT / "ops/cpu/csrc").rglob("*.*"):
        room = path.relative_to(ROOT / "ops/cpu/csrc").parts
        entered = set(re.findall(r'#include "families/(\w+)/', path.read_text()))
        if room[0] == "engine" and path.suffix == ".h":
            assert not entered, path
        if room[0] == "families" and len(room) > 2:
            assert entered <= {"plain"}, path
