#!/usr/bin/env bash
# Tests what users get: the wheel, installed, without the source tree and without a compiler (`make test-wheel`, part of .ci/run).
#     tests/run_installed.sh [WHEEL]        builds one if none is given; PYTHON: one with the packages of `make setup`
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ $# = 0 ]; then
  "$PYTHON" -m pip wheel -q --no-deps -C build-dir="$work/build" -w "$work/dist" .  # not in build/, which an editable installation uses
  set -- "$work"/dist/kvbits-*.whl
fi
case $1 in *-py3-none-*) ;; *) echo "$1: a wheel for every Python is called ...-py3-none-PLATFORM"; exit 1 ;; esac

# An environment of its own, which sees the packages that kvbits needs but no kvbits of the source tree: paths in a .pth file do not follow further .pth files.
"$PYTHON" -m venv "$work/venv"
site=$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
"$work/venv/bin/pip" install -q --no-deps "$1"
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/packages.pth"

# What tests read besides the package. No src: whatever is imported from there would not be found.
mkdir "$work/root"
cp -r tests "$work/root/tests"
ln -s "$PWD"/{README.md,docs,benchmarks,examples,pyproject.toml} "$work/root/"
cd "$work/root"
export CC=/bin/false CXX=/bin/false CUDACXX=/bin/false
python=$work/venv/bin/python

"$python" - <<'CHECK'
import importlib.metadata, sys
from pathlib import Path

import kvbits
from kvbits.ops.cpu import library

home = Path(kvbits.__file__).parent
assert Path(sys.prefix) in home.parents, f"kvbits comes from {home}, not from the wheel"
assert importlib.metadata.version("kvbits") == kvbits.__version__
assert (home / "py.typed").exists() and list(home.rglob("*.cu")), "py.typed and the CUDA sources belong into the wheel"
assert library.unavailable() is None, library.unavailable()
print(f"kvbits {kvbits.__version__} from {home}, CPU kernels: {library.tier()}")
CHECK
"$work/venv/bin/kvbits" plan --layers 32 --kv-heads 8 --head-dim 128 --gpu-memory 80GB --weights 16GB --context 8k --scheme bf16,int8_centered > /dev/null
"$python" -m pytest -q -n 2 -p no:benchmark -m "not night" tests/contracts/test_exports.py tests/test_cli.py tests/ops/test_cpu_close.py \
  tests/ops/test_cuda_compile.py::test_close_kernels_compile_without_spills tests/integrations/test_huggingface.py \
  tests/report/test_report.py tests/report/test_plan_page.py tests/evaluate/test_texts.py
echo "the installed wheel passed, $SECONDS s in all"
