"""The public surface, listed once: adding or removing a name is a decision, not an accident."""

import pytest

import kvbits
from kvbits import errors

EXPORTS = sorted(kvbits.__all__)


def test_what_the_package_promises_is_there():
    promised = {"CacheSpec", "LayerGeometry", "PagedCache", "QuantSpec", "Scheme", "PerChannel", "PerGroup", "PerTensor", "PerToken", "KvbitsError"}
    assert promised <= set(kvbits.__all__)
    assert len(set(kvbits.__all__)) == len(kvbits.__all__)


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_resolves_and_is_listed_by_dir(name):
    assert getattr(kvbits, name) is not None
    assert name in dir(kvbits)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvbits.nonsense


def test_every_error_is_a_kvbits_error_and_drawn_in_the_docstring():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert len(classes) > 5
    for c in classes:
        assert issubclass(c, errors.KvbitsError)
        assert c.__name__ in errors.__doc__
        assert c.__doc__
