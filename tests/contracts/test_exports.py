"""The public surface, listed once: adding or removing a name is a decision, not an accident."""

import pytest
from messages import raises

import kvbits
from kvbits import errors

EXPORTS = {
    "CacheSpec",
    "Calibration",
    "KVCache",
    "KvbitsError",
    "LayerGeometry",
    "Override",
    "PagedCache",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "PrefixStore",
    "QuantSpec",
    "Scheme",
    "__version__",
    "graphed",
    "identity",
    "load_model",
    "schemes",
}


def test_the_package_exports_exactly_what_it_promises():
    assert sorted(kvbits.__all__) == sorted(EXPORTS)
    assert set(dir(kvbits)) == EXPORTS


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_every_export_resolves(name):
    assert getattr(kvbits, name) is not None


def test_unknown_names_are_attribute_errors():
    with raises(AttributeError, "nonsense"):
        _ = kvbits.nonsense


def test_every_error_is_a_kvbits_error_and_drawn_in_the_docstring():
    classes = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, Exception) and not issubclass(c, Warning)
    ]
    assert len(classes) > 5
    for c in classes:
        assert issubclass(c, errors.KvbitsError)
        assert c.__name__ in errors.__doc__
        assert c.__doc__
