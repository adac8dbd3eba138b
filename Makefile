# Everything happens in VENV, which is made on first use. It, PYTHON and TORCH may be given:
#   make test VENV=.venv-new PYTHON=python3.12 TORCH=torch==2.14.1
# Only gpu-check takes PYTHON as it is, with the torch for CUDA that it holds, and no network.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OUT ?= build/gpu-check/$(GROUP)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
CPP := $(wildcard csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*/*.cu tests/*/*.cpp)
CPP += $(wildcard bench/*.h bench/*.cu)

WHEELS := build/wheels

.PHONY: test test-all test-exhaustive fuzz stress bench gpu-check lint format clean FORCE
.PHONY: test-cuda test-torch test-oldest test-newest test-wheels wheel

# A process for each core, and one thread in each process. PYTEST takes more options of pytest.
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=8 --dist=worksteal

# The quick tests; `test-all` runs the slow ones too.
test: $(VENV)/test.stamp
	$(RUN_TESTS) -m 'not slow' $(PYTEST)
test-all: $(VENV)/test.stamp
	$(RUN_TESTS) $(PYTEST)

# Every float, and every option with every hostile change of the arguments, where `test` takes a
# sample. Prints what it counted, and takes hours.
test-exhaustive: export FUSEDRNN_EXHAUSTIVE = 1
test-exhaustive: $(VENV)/test.stamp
	$(BIN)/python -m pytest -s tests/values/test_math.py tests/hostile/test_hostile_scales.py

# Random calls, right and wrong ones, by the library as it is and by one for sanitizers.
MINUTES ?= 10
SEED ?= 1
fuzz: $(VENV)/test.stamp
	cd tests && PYTHONPATH=.. $(abspath $(BIN))/python -m fuzz all --minutes $(MINUTES) --seed $(SEED)

# The long form of tests/stress/test_stress.py: many steps and calls, threads, processes, and no
# memory. Takes less than 15 minutes on two cores.
stress: export OMP_NUM_THREADS = 1
stress: $(VENV)/test.stamp
	cd tests && $(abspath $(BIN))/python -m stress

# What can be tested of CUDA without a GPU, where there is nvcc: the tests whose results depend on
# torch, with a torch for CUDA; then both wheels with the oldest torch and with the newest. Kernels
# for one GPU are enough where there is none: `test-all` compiles them for the others.
test-cuda: export TORCH_CUDA_ARCH_LIST ?= 9.0
test-cuda: wheel
	FUSEDRNN_CUDA=1 $(MAKE) test-torch wheel VENV=.venv-cuda TORCH=torch==2.14.1
	$(MAKE) --jobs=2 --output-sync=target test-oldest test-newest

test-oldest:
	$(MAKE) test-wheels VENV=.venv-oldest TORCH=torch==2.11.0
test-newest:
	$(MAKE) test-wheels VENV=.venv-newest TORCH=torch==2.15.0

# Leaves out the emulation and the math, which use nothing of torch that differs between its versions.
test-torch: OF_TORCH := api values gpu/test_cuda_library.py gpu/test_fake_cuda.py
test-torch: OF_TORCH += project/test_packaging.py
test-torch: $(VENV)/test.stamp
	$(RUN_TESTS) -m 'not slow and not emulated' --ignore=tests/values/test_math.py \
	    $(addprefix tests/,$(OF_TORCH))

wheel: $(VENV)/test.stamp
	rm -rf $(WHEELS)/$(notdir $(VENV))
	$(PIP) wheel --no-deps --wheel-dir $(WHEELS)/$(notdir $(VENV)) .

# Values, operators and torch.compile with a wheel that was built elsewhere. Runs from another
# folder, because `import fusedrnn` must not find the source tree.
test-wheels: OF_WHEELS := values/test_any_sizes.py api/test_compile.py gpu/test_cuda_library.py
test-wheels: $(VENV)/torch.txt
	set -e; wheels=$$(find $(WHEELS) -name '*.whl'); for wheel in $$wheels; do \
	    $(PIP) install --force-reinstall --no-deps "$$wheel"; $(PIP) install "$$wheel[test]"; \
	    (cd $(WHEELS) && $(abspath $(BIN))/python -m pytest -m 'not emulated' \
	        $(addprefix $(CURDIR)/tests/,$(OF_WHEELS))); \
	done

# At most four minutes on two cores; `python -m bench --all` measures everything.
bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench

# GROUP: first (build, probes, tests), speed, deep, or cells (those that users write).
GROUP ?= first
gpu-check:
	$(PYTHON) -m bench.gpu_check $(OUT) --group $(GROUP)

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy fusedrnn
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/lint.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

clean: # keeps downloads
	rm -rf .venv*/*.stamp build *.egg-info fusedrnn/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# One stamp per extra. Only what runs the compiled code has to wait for it.
$(VENV)/test.stamp $(VENV)/bench.stamp: $(CPP) build/built-for.txt
$(VENV)/%.stamp: $(VENV)/torch.txt setup.py pyproject.toml $(wildcard build_backend/*.py)
	$(PIP) install --editable '.[$*]'
	@touch $@

# Records which environment built the libraries in the source tree: another one builds its own.
build/built-for.txt: FORCE
	@mkdir -p build; echo '$(VENV)' | cmp --quiet - $@ || echo '$(VENV)' > $@

# Records which torch is installed. torch comes first, because the package is compiled against it.
$(VENV)/torch.txt: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp --quiet - $@ || \
	    { $(PIP) install '$(TORCH)' 'setuptools>=77' ninja pybind11 && echo '$(TORCH)' > $@; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or \
	    sys.exit("fusedrnn: Python 3.10 or newer is needed, found %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
