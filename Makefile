# Everything from a bare machine with Python 3.11 or newer. `make demo` and `make test` set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
GPU_JOBS ?= 12
FUZZ_SECONDS ?= 3600
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# torchrec asks for the CUDA build of FBGEMM; its CPU build exists for this platform only.
TORCHREC := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),yes)
# Bytecode of tests and of the package is kept: without, each process of the tests compiles both anew, which takes longer
# than all the rest of collecting them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-cpu test-quick test-pages lint test-gpu test-gpu-kernels test-gpu-models test-gpu-timing fuzz bench-scale judge-samplers quality docs-api docs-chart docs-site clean
.DEFAULT_GOAL := test

# A small Wukong as it is and in FP8, in six pairs of runs, and a page to open; three minutes on two cores. That six
# pairs may leave it undecided (3) is no failure of the demo. On a GPU, steps are measured, too.
demo: $(VENV)/.demo
	$(BIN)/loka generate policies/demo.yaml
	$(BIN)/loka compare policies/demo.yaml --seeds 6 --draws 1 --jobs $(JOBS) || test $$? -eq 3
	rm -rf build/demo
	! $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || \
	  $(BIN)/loka bench model policies/demo.yaml --variants bf16,loka-bf16,loka-fp8 --batch 65536 --only train,loop,reduce-overhead --seconds 90 -o build/demo
	$(BIN)/loka report policies/demo.yaml $$(find build/demo -name "*.json" 2>/dev/null | sed 's/^/--measured /') -o build/demo.html
	@echo "Open $(CURDIR)/build/demo.html in a browser."

# Linters run beside the tests: mypy has one core, and there are two.
test: $(VENV)/.dev
	$(MAKE) -j 2 lint test-cpu

TIMING := $(shell grep -rl "mark\.timing" tests --include="test_*.py")

# One thread for each of pytest's workers: with more they wait for one another, and the tests take more than twice the time.
# Tests that hold a time to a bound run after the others, with nothing beside them.
test-cpu: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not timing"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "timing and not gpu" $(TIMING)
	$(BIN)/loka generate --check policies/ranker.yaml

# Those that take less than a quarter of a second, of every room: for between two changes.
test-quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not slow and not timing"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# On a machine with a Hopper GPU and the packages of this project already there; GPU_JOBS processes share the GPU.
# Two halves, each of which can be asked for alone, and the tests that hold a time to a bound, with nothing beside them.
# A process compiles on one thread: twelve that each start a pool of compilers, and of threads for what is computed on
# the CPU to compare with, wait for one another. What Triton compiles is shared through its cache on disk, so that tests
# of one file may run in any process.
GPU_KERNELS := $(sort $(shell find tests/kernels -name "*_gpu.py"))
GPU_MODELS := $(filter-out $(GPU_KERNELS),$(sort $(shell find tests -name "*_gpu.py")))
GPU_SHARED = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(PYTHON) -m pytest -n $(GPU_JOBS) --dist worksteal \
  -m "gpu and not timing" --durations=20

test-gpu:
	$(GPU_SHARED) $(GPU_MODELS) $(GPU_KERNELS)
	$(MAKE) test-gpu-timing

test-gpu-kernels:
	$(GPU_SHARED) $(GPU_KERNELS)

test-gpu-models:
	$(GPU_SHARED) $(GPU_MODELS)

test-gpu-timing:
	$(PYTHON) -m pytest -m "gpu and timing" --durations=20 $(GPU_MODELS)

# The quality gate: the shipped recipe must keep the budget (exit status 0), and one that clips must be found out (1).
# Needs MovieTweetings: LOKA_DATA names its folder. About 25 minutes on two cores.
quality: $(VENV)/.demo
	$(BIN)/loka generate policies/movietweetings.yaml --out build/quality/generated/movietweetings
	cd build/quality && OMP_NUM_THREADS=1 $(abspath $(BIN))/loka compare $(CURDIR)/policies/movietweetings.yaml \
	  --seeds 75 --draws 1 --jobs $(JOBS)
	$(BIN)/loka generate tests/bench/clipped.yaml --out build/quality/generated/clipped
	cd build/quality && OMP_NUM_THREADS=1 $(abspath $(BIN))/loka compare $(CURDIR)/tests/bench/clipped.yaml \
	  --seeds 75 --draws 1 --jobs $(JOBS); test $$? -eq 1

# The page of `loka report` in headless Chromium, which is installed first where apt-get can; without one, these tests
# are skipped.
test-pages: $(VENV)/.dev
	command -v chromium || command -v google-chrome || { apt-get update -qq && apt-get install -y -qq chromium; } || true
	$(BIN)/python -m pytest -rs tests/bench/report

# Odd and damaged files for as long as FUZZ_SECONDS says, for each kind of file (FUZZ_SEED repeats a run); then rankers
# in 60 spellings each.
fuzz: $(VENV)/.dev
	seed=$${FUZZ_SEED:-$$(date +%s)}; echo "seed $$seed"; OMP_NUM_THREADS=1 LOKA_FUZZ_SECONDS=$(FUZZ_SECONDS) \
	  LOKA_FUZZ_SEED=$$seed $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile=fuzz tests/fuzz
	OMP_NUM_THREADS=1 LOKA_SPELLINGS=60 $(BIN)/python -m pytest tests/codegen/modules/test_rankers_in_any_spelling.py

bench-scale: $(VENV)/.demo
	$(BIN)/python -m benchmarks.cli_scale

# What Probe predicts against held-out real batches, four models, about ten minutes. Needs MovieTweetings (LOKA_DATA).
judge-samplers: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.held_out --out build/samplers.json --table docs/results/samplers.md

# docs/api.md, from the docstrings of the public API.
docs-api: $(VENV)/.demo
	$(BIN)/python docs/api_page.py

# docs/chart.svg, from the figures in docs/chart.json.
docs-chart: $(VENV)/.demo
	$(BIN)/python docs/chart.py

# The pages as a site, in build/site.
docs-site: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "LoKA needs Python 3.11 or newer; '$(PYTHON)' is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing LoKA into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e '.[dev]'
ifeq ($(TORCHREC),yes)
	$(PIP) install -c constraints.txt tensordict torchmetrics pyre-extensions tqdm
	$(PIP) install --no-deps torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0
endif
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
