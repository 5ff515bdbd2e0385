#!/usr/bin/env bash
# The oldest Transformers that pyproject.toml allows, with what it needs older, beside the environment of the tests: what hangs on how generate() and models pass a cache.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=5.14.0 folder=build/transformers
if [ ! -d "$folder/transformers-$version.dist-info" ]; then
  rm -rf "$folder"
  .venv/bin/python -m pip install -q --no-deps --target "$folder" "transformers==$version" huggingface-hub==1.33.0 tokenizers==0.22.2 httpx==0.28.1 httpcore==1.0.9
fi
PYTHONPATH="$folder" OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest -q -p no:cacheprovider -n 2 -m "not night" \
  tests/integrations/test_{generation,attach,dropped_caches,huggingface}.py
