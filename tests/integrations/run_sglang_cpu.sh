#!/usr/bin/env bash
# The SGLang plugin inside SGLang's official wheel on a CPU, in an environment of its own, then its tests. Its own processes, scheduler and model runner run; what it
# imports and a machine without a GPU does not have stands in tests/integrations/sglang_stand_ins (names, and operators that move drafts).
# usage: tests/integrations/run_sglang_cpu.sh [ENVIRONMENT], from a checkout whose Python has torch, transformers and pytest (make setup)
# KVBITS_NIGHT=1 runs all tests, and the quick ones in 0.5.22, the oldest release that is served; else those of a minute or two. KVBITS_INSTALL=1 sets the environment up and runs nothing.
# Exit status 77, with the reason, where the wheel or what it needs cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${PYTHON:-.venv/bin/python} environment=${1:-build/sglang-cpu}

if [ ! -f "$environment/.done" ]; then
  "$base" -m venv --without-pip "$environment"
  site=$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  "$base" -c 'import sys; print("\n".join(["'"$PWD"'/src", "'"$PWD"'/tests/integrations/sglang_stand_ins", *[p for p in sys.path if p.endswith("site-packages")]]))' > "$site/base.pth"
  echo 'import sglang_stand_ins' > "$site/stand_ins.pth"
  # SGLang finds the plugin by its entry point, in every process.
  mkdir -p "$site/kvbits-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: kvbits\nVersion: 0\n' > "$site/kvbits-0.dist-info/METADATA"
  printf '[sglang.srt.plugins]\nkvbits = kvbits.integrations.sglang:register\n' > "$site/kvbits-0.dist-info/entry_points.txt"
  # All but what runs on GPUs; triton and torchvision are only imported.
  if ! "$base" -m pip --python "$environment/bin/python" install -q --no-deps sglang==0.5.23 torchvision==0.28.0 aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio \
    apache-tvm-ffi==0.1.11 attrs blobfile compressed-tensors==0.18.0 decorator dill distro easydict einops fastapi==0.136.3 frozenlist h11 httpcore httpx interegular \
    ipython jiter llguidance==1.9.1 loguru msgspec multidict nvidia-ml-py openai==2.8.0 openai-harmony==0.0.4 orjson partial_json_parser prometheus-client propcache pybase64 pydantic \
    python-multipart pyzmq sentencepiece setproctitle sniffio soundfile cffi pycparser starlette==1.10.0 tiktoken torch_memory_saver traitlets triton==3.9.0 typing-inspection uvicorn uvloop \
    watchfiles xgrammar==0.2.7 xxhash yarl zstandard 2> "$environment/pip.log"; then
    echo "SGLang on a CPU: skipped, it cannot be installed: $(grep -v '^WARNING' "$environment/pip.log" | tail -1)"
    exit 77
  fi
  touch "$environment/.done"
fi
[ -z "${KVBITS_INSTALL:-}" ] || exit 0
night=(-m "not night")
[ -z "${KVBITS_NIGHT:-}" ] || night=()
export OMP_NUM_THREADS=1
"$environment/bin/python" -m pytest -q --durations=5 ${night[@]+"${night[@]}"} tests/integrations/test_sglang_steps.py tests/integrations/test_sglang.py
[ -n "${KVBITS_NIGHT:-}" ] || exit 0
[ -d "$environment/oldest" ] || "$base" -m pip install -q --no-deps --target "$environment/oldest" sglang==0.5.22
PYTHONPATH=$environment/oldest exec "$environment/bin/python" -m pytest -q -m "not night" tests/integrations/test_sglang.py
