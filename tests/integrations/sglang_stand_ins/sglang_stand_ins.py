"""Stand-ins for what SGLang's official wheel imports and a machine without a GPU does not have. With them SGLang's own
engine, scheduler and model runner start on a CPU.

Run at the start of every process of the environment that tests/integrations/run_sglang_cpu.sh makes. Nothing of SGLang
is replaced:

    sgl_kernel    its wheel is for CUDA only. Names can be imported; calling one fails with its name, but for the few
                  that move drafts' integers (sgl_drafts.py).
    torchvision   its operators are in a library for CUDA. Two are declared, since it describes their results when it is
                  imported.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from typing import NoReturn

import sgl_drafts
import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


class _Absent:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self._name}, which is for GPUs only")


class _Kernels(types.ModuleType):
    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(sgl_drafts, name, None) or _Absent(name)


for _name in ("sgl_kernel", "sgl_kernel.speculative"):
    sys.modules[_name] = _Kernels(_name)
    sys.modules[_name].__spec__ = importlib.machinery.ModuleSpec(_name, None)
LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
