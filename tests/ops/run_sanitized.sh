#!/bin/sh
# Runs the CPU kernel tests on a library built with AddressSanitizer and UndefinedBehaviorSanitizer:
#     tests/ops/run_sanitized.sh [pytest arguments]
# KVBITS_HYPOTHESIS=thorough fuzzes longer. Needs GCC; about four minutes to build.
set -e
cd "$(dirname "$0")/../.."
cmake -S . -B build/sanitized -DKVBITS_SANITIZE=ON >/dev/null
cmake --build build/sanitized --parallel 2
export KVBITS_CPU_LIBRARY="$PWD/build/sanitized/libkvbits_cpu.so" PYTHONPATH="$PWD/src"
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
  exec "${PYTHON:-python}" -m pytest -q -s tests/ops/test_cpu_attend.py tests/ops/test_cpu_close.py tests/ops/test_store.py "$@"
