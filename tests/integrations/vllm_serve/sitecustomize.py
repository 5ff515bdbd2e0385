"""The shim of vllm_cpu.py in every process of `vllm serve` (see run_vllm_cpu.sh)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from integrations import vllm_cpu

vllm_cpu.install()
