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

.PHONY: test test-slow fuzz stress test-cuda test-wheels wheel bench gpu-check lint format clean
.PHONY: FORCE

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(PYTEST)

# What `test` takes a sample of: every float, and every option with every hostile change of the
# arguments. Prints what it counted, and takes hours.
test-slow: export FUSEDRNN_EXHAUSTIVE = 1
test-slow: $(VENV)/test.stamp
	$(BIN)/python -m pytest -s tests/values/test_math.py tests/hostile/test_hostile_scales.py

# Random calls, right and wrong ones, by the library as it is and by one for sanitizers.
MINUTES ?= 10
SEED ?= 1
fuzz: $(VENV)/test.stamp
	cd tests && PYTHONPATH=.. $(abspath $(BIN))/python -m fuzz all --minutes $(MINUTES) --seed $(SEED)

# What `test` runs the short form of: many steps and calls, threads, processes, and no memory. Takes
# less than 15 minutes on two cores.
stress: export OMP_NUM_THREADS = 1
stress: $(VENV)/test.stamp
	cd tests && $(abspath $(BIN))/python -m stress

# All that CUDA can be tested for without a GPU, where there is nvcc: everything on a torch for
# CUDA, then both wheels on the oldest torch and on the newest. Kernels for one GPU are enough where
# there is none; what nvcc makes of them for others does not depend on torch, and `test` looks at it.
test-cuda: export TORCH_CUDA_ARCH_LIST ?= 9.0
# They look at what nvcc makes of the sources, and at benchmarks.
test-cuda: SAME_ON_EVERY_TORCH := gpu/test_cuda_kernels.py gpu/test_ptx.py bench/test_bench.py bench/test_gpu_check.py
test-cuda: wheel
	FUSEDRNN_CUDA=1 $(MAKE) test wheel VENV=.venv-cuda TORCH=torch==2.14.1 \
	    PYTEST="$(addprefix --ignore=tests/,$(SAME_ON_EVERY_TORCH))"
	$(MAKE) test-wheels VENV=.venv-oldest TORCH=torch==2.11.0
	$(MAKE) test-wheels VENV=.venv-newest TORCH=torch==2.15.0

wheel: $(VENV)/test.stamp
	rm -rf $(WHEELS)/$(notdir $(VENV))
	$(PIP) wheel --no-deps --wheel-dir $(WHEELS)/$(notdir $(VENV)) .

# Values and operators of what was built elsewhere, and what torch.compile makes of Python. From
# another folder, because `import fusedrnn` must not find the source tree.
test-wheels: OF_WHEELS := values/test_any_sizes.py api/test_compile.py gpu/test_cuda_library.py
test-wheels: $(VENV)/torch.txt
	set -e; wheels=$$(find $(WHEELS) -name '*.whl'); for wheel in $$wheels; do \
	    $(PIP) install --force-reinstall --no-deps "$$wheel"; $(PIP) install "$$wheel[test]"; \
	    (cd $(WHEELS) && $(abspath $(BIN))/python -m pytest -k 'not emulated' \
	        $(addprefix $(CURDIR)/tests/,$(OF_WHEELS))); \
	done

# At most four minutes on two cores; `python -m bench --all` measures everything.
bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench

# GROUP: first (build, probes, tests), speed or deep.
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

clean: # keeps what was downloaded
	rm -rf .venv*/*.stamp build *.egg-info fusedrnn/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# One stamp per extra. Only what runs the compiled code has to wait for it.
$(VENV)/test.stamp $(VENV)/bench.stamp: $(CPP) build/built-for.txt
$(VENV)/%.stamp: $(VENV)/torch.txt setup.py pyproject.toml $(wildcard build_backend/*.py)
	$(PIP) install --editable '.[$*]'
	@touch $@

# Names whose the compiled libraries in the source tree are: another environment builds its own.
build/built-for.txt: FORCE
	@mkdir -p build; echo '$(VENV)' | cmp --quiet - $@ || echo '$(VENV)' > $@

# Names the torch that is installed. torch comes first, because the package is compiled against it.
$(VENV)/torch.txt: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp --quiet - $@ || \
	    { $(PIP) install '$(TORCH)' 'setuptools>=77' ninja pybind11 && echo '$(TORCH)' > $@; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or \
	    sys.exit("fusedrnn: Python 3.10 or newer is needed, found %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
