#!/usr/bin/env bash
# Stock SGLang 0.5.23 for a GPU machine of sm_90 without a network, with Python 3.12, torch 2.11 of CUDA 13 and nvcc: for measuring, never for shipping.
# usage: benchmarks/sglang_bundle.sh FOLDER     makes FOLDER/kernel.tar.xz (31 MiB), FOLDER/sglang.tar.xz (10) and FOLDER/whl (15)
#
# sglang-kernel 0.4.10, which SGLang names, is linked to torch 2.14; 0.4.4 has the operators that dense models call and is linked to what torch 2.11 has, so SGLang's check of
# its version is off. One line is changed: SGLang imports CUTLASS' Python package to ask whether a kernel of Blackwell GPUs can be used, and is told no before. What is left out:
# machine code of other GPUs (trim_fatbin.py), models of pictures, tests, and what is in Rust, of which the radix tree fails with torch 2.11 (SGLang then takes the one in
# Python). IPython, of which SGLang imports two names for notebooks, is those names. There:
#
#   SITE=~/site; mkdir -p $SITE; for x in kernel sglang; do tar -C $SITE -xJf $x.tar.xz; done
#   python3 -m pip install -q --no-index --no-deps --target $SITE whl/*.whl
#   cp -r src/kvbits $SITE/     with a kvbits-*.dist-info whose entry_points.txt has pyproject.toml's, so that SGLang finds the plugin
#   export PYTHONPATH=$SITE HF_HUB_OFFLINE=1 SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) base=${PYTHON:-python3}
mkdir -p "$1/whl" "$1/x" && cd "$1"
asked=(--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for n in 39 35 34 31 28 27 26 24 17; do asked+=(--platform "manylinux_2_${n}_x86_64"); done
asked+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"$base" -m pip download -q --no-deps "${asked[@]}" -d x sglang==0.5.23 sglang-kernel==0.4.4
"$base" -m pip download -q --no-deps "${asked[@]}" -d whl apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro fastapi==0.136.3 gguf jiter jsonschema jsonschema-specifications loguru msgspec openai==2.8.0 orjson \
  partial_json_parser pybase64 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection python-multipart pyzmq referencing rpds-py setproctitle sniffio soundfile cffi pycparser \
  starlette==1.10.0 torch_memory_saver uvicorn watchfiles xgrammar==0.2.7
(
  cd x
  unzip -qo sglang-0.5.23-*.whl && unzip -qo sglang_kernel-0.4.4-*.whl 'sgl_kernel/*' 'sglang_kernel-*'
  rm -rf sglang/multimodal_gen sglang/test/[!_]* sglang/srt/rust_extensions/_*.so sglang/srt/mem_cache/rust_tree_core/*.so sgl_kernel/sm100 sgl_kernel/flashmla_ops* sgl_kernel/infllm_ops*
  sed -i '0,/if not is_cuda():/s//if True:/' sglang/srt/layers/dual_gemm.py && grep -q 'if True:' sglang/srt/layers/dual_gemm.py
  mkdir -p IPython && : > IPython/__init__.py && echo 'HTML = display = None' > IPython/display.py
  for so in sgl_kernel/flash_ops.abi3.so sgl_kernel/sm90/common_ops.abi3.so; do "$base" "$here/trim_fatbin.py" "$so" "$so"; done
  tar -c sgl_kernel sglang_kernel-*.dist-info | xz -3 -T2 > ../kernel.tar.xz
  tar -c sglang sglang-*.dist-info IPython | xz -3 -T2 > ../sglang.tar.xz
)
du -ch kernel.tar.xz sglang.tar.xz whl | tail -4
