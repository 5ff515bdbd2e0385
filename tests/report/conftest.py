import pytest
import tiny

from kvbits.evaluate.run import Evaluation
from kvbits.evaluate.settings import Options
from kvbits.evaluate.texts import Text, novel


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    import torch

    out = tmp_path_factory.mktemp("results")
    options = Options(windows=2, length=220, chunk=32)
    for name, dtype in (("tiny", torch.bfloat16), ("tiny", torch.float32)):
        Evaluation(
            name=name,
            schemes=["raw", "int8", "int4", "kivi4", "kivi2"],
            tasks=["fidelity", "attention"],
            texts=(Text("t", novel()[:2000]),),
            out=out,
            options=options,
        ).run(tiny.model(dtype=dtype), tiny.tokenizer(), progress=False)
    return out
