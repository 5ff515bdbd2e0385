"""Private operators of torch, as the torch that is installed has them."""

import torch
from messages import raises

from kvbits.contract import calls, see
from kvbits.errors import UnsupportedError
from kvbits.ops.torch_operators import CONTRACT, CPU, CUDNN, FLASH, operator


def test_this_torch_has_them_as_declared():
    assert not CONTRACT.broken
    assert [operator(name) for name in (FLASH, CUDNN, CPU)] == [getattr(torch.ops.aten, n) for n in (FLASH, CUDNN, CPU)]
    assert callable(torch._dynamo.maybe_mark_dynamic) and callable(torch._assert_async)


def test_schemas_are_read():
    path = f"torch:ops.aten.{CPU}.default"
    assert calls(path, "query key value scale").differs(see(path)) is None
    assert calls(path, "query key value sinks").differs(see(path)) == "has no sinks"
    assert calls(path, "query key").differs(see(path)) == "has value besides"


def test_an_operator_that_is_otherwise_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(vars(CONTRACT), "broken", {f"torch:ops.aten.{CPU}.default": "has no scale"})
    operator.cache_clear()
    try:
        with raises(UnsupportedError, f"{CPU}.default", "scale"):
            operator(CPU)
        assert operator(FLASH) is getattr(torch.ops.aten, FLASH), "the others serve"
    finally:
        operator.cache_clear()
