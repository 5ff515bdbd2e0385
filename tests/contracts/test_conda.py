"""conda/recipe.yaml says what pyproject.toml says: no channel is built from it here, so nothing else would notice."""

import re
from pathlib import Path

import pytest

import kvbits

tomllib, yaml = pytest.importorskip("tomllib"), pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, RECIPE = PYPROJECT["project"], yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}


def as_conda(requirements):
    """ "numpy>=1.26" of PyPI as "numpy >=1.26" of conda; what names kvbits itself is left out."""
    found = (re.match(r"([\w-]+)(.*)", one) for one in requirements)
    return [f"{CONDA_NAMES.get(m[1], m[1])} {m[2]}" for m in found if m[1] != "kvbits"]


def test_version_and_build():
    assert RECIPE["schema_version"] == 1 and RECIPE["context"]["version"] == kvbits.__version__
    assert set(as_conda(PYPROJECT["build-system"]["requires"])) <= set(RECIPE["requirements"]["host"])
    assert RECIPE["build"]["python"]["version_independent"] == (
        PYPROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "py3"
    )


def test_dependencies_and_what_extras_may_be_beside_it():
    python, *others = RECIPE["requirements"]["run"]
    assert python == f"python {PROJECT['requires-python']}" and others == as_conda(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert RECIPE["requirements"]["run_constraints"] == as_conda([*extras["torch"], *extras["hf"]])


def test_the_command():
    assert RECIPE["build"]["python"]["entry_points"] == [
        f"{name} = {home}" for name, home in PROJECT["scripts"].items()
    ]


def test_what_it_says_about_the_project():
    about = RECIPE["about"]
    assert (about["summary"], about["license"], about["license_file"]) == (
        PROJECT["description"],
        PROJECT["license"],
        PROJECT["license-files"],
    )
    assert (about["repository"], about["documentation"]) == (
        PROJECT["urls"]["Repository"],
        PROJECT["urls"]["Documentation"],
    )
