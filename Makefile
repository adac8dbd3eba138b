# Everything happens in VENV, which is made on first use. It, PYTHON and TORCH may be given:
#   make test VENV=.venv-new PYTHON=python3.12 TORCH=torch==2.14.1
# Only gpu-check takes PYTHON as it is, with the torch for CUDA that it holds, and no network.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
OUT ?= build/gpu-check/$(GROUP)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROGRESS := build_backend/progress.sh
CPP := $(wildcard csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*/*.cu tests/*/*.cpp)
CPP += $(wildcard bench/*.h bench/*.cpp bench/*.cu)
LINTERS := ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5

WHEELS := build/wheels

.PHONY: test test-slow test-nightly test-exhaustive fuzz stress bench gpu-check lint format clean FORCE
.PHONY: gpu-libraries test-cuda test-torch test-oldest test-newest test-wheels wheel venvs

# A process for each core, and one thread in each process. PYTEST takes more options of pytest.
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=8 --dist=worksteal
# What tests need from a C++ compiler: it is built before they begin, and a failure stops them.
BUILD = $(BIN)/python tests/builds.py

# The quick tests. CI runs the slow ones too, and test-nightly all that is left.
test: $(VENV)/test.stamp
	$(BUILD) quick
	$(RUN_TESTS) -m 'not slow and not nightly' $(PYTEST)
test-slow: $(VENV)/test.stamp
	$(BUILD) slow
	$(RUN_TESTS) -m 'not nightly' --times $(PYTEST)
# Takes hours: for a change of kernels, of the tracer or of the build, and before a release.
test-nightly: $(VENV)/test.stamp
	$(BUILD) nightly
	$(RUN_TESTS) -m nightly --timeout=7200 --times $(PYTEST)
	$(MAKE) wheel
	if [ -x '$(NVCC)' ]; then TORCH_CUDA_ARCH_LIST='8.0;9.0a;10.0' $(MAKE) wheel $(CUDA); fi
	$(MAKE) test-newest

# Every float, and every option with every hostile change of the arguments, where `test` takes a
# sample. Prints what it counted, and takes hours.
test-exhaustive: export FUSEDRNN_EXHAUSTIVE = 1
test-exhaustive: $(VENV)/test.stamp
	$(BIN)/python -m pytest -s tests/values/test_math.py tests/calls/test_scales.py

# Random calls, right and wrong ones, by the library as it is and by one for sanitizers.
MINUTES ?= 10
SEED ?= 1
fuzz: $(VENV)/test.stamp
	$(BUILD) slow
	cd tests && PYTHONPATH=.. $(abspath $(BIN))/python -m fuzz all --minutes $(MINUTES) --seed $(SEED)

# The long form of tests/stress/test_stress.py: many steps and calls, threads, processes, and no
# memory. Takes less than 15 minutes on two cores.
stress: export OMP_NUM_THREADS = 1
stress: $(VENV)/test.stamp
	cd tests && $(abspath $(BIN))/python -m stress

# What can be tested of CUDA without a GPU, where there is nvcc: the tests whose results depend on
# torch, with a torch for CUDA, and wheels for CPU and CUDA, which test-oldest tries with the oldest
# torch. Kernels for one GPU are enough: `test-nightly` compiles them for others.
test-cuda: wheel
	TORCH_CUDA_ARCH_LIST=$${TORCH_CUDA_ARCH_LIST:-9.0} $(MAKE) test-torch wheel $(CUDA)

NVCC := $(or $(shell command -v nvcc),$(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc)
# Kernels that this machine has compiled before are not compiled again.
CACHED_NVCC := '$(CURDIR)/.venv-cuda/bin/python $(CURDIR)/tests/cached_nvcc.py $(NVCC)'
CUDA := VENV=.venv-cuda TORCH=torch==2.14.1 FUSEDRNN_CUDA=1 PYTORCH_NVCC=$(CACHED_NVCC)
OLDEST := VENV=.venv-oldest TORCH=torch==2.11.0
NEWEST := VENV=.venv-newest TORCH=torch==2.15.0

test-oldest:
	$(MAKE) test-wheels $(OLDEST)
test-newest:
	$(MAKE) test-wheels $(NEWEST)

# The torches of test-cuda. CI installs them while other things run.
venvs:
	$(MAKE) .venv-cuda/torch.txt $(CUDA)
	$(MAKE) .venv-oldest/torch.txt $(OLDEST)

# Leaves out the emulation and the math, which use nothing of torch that differs between its versions.
test-torch: OF_TORCH := api values gpu/test_cuda_library.py project/test_packaging.py
test-torch: $(VENV)/test.stamp
	$(RUN_TESTS) -m 'not slow and not nightly and not emulated' --times \
	    --ignore=tests/values/test_math.py $(addprefix tests/,$(OF_TORCH))

wheel: $(VENV)/test.stamp
	rm -rf $(WHEELS)/$(notdir $(VENV))
	@echo 'building a wheel with $(VENV)'
	@$(PROGRESS) $(VENV)/wheel.log \
	    $(PIP) wheel --verbose --no-deps --wheel-dir $(WHEELS)/$(notdir $(VENV)) .

# Values, operators and torch.compile with a wheel that was built elsewhere. Runs from another
# folder, because `import fusedrnn` must not find the source tree.
test-wheels: OF_WHEELS := values/test_any_sizes.py api/test_compile.py gpu/test_cuda_library.py
test-wheels: $(VENV)/torch.txt
	set -e; wheels=$$(find $(WHEELS) -name '*.whl'); test -n "$$wheels"; for wheel in $$wheels; do \
	    $(PIP) install --quiet --force-reinstall --no-deps "$$wheel"; \
	    $(PIP) install --quiet "$$wheel[test]"; \
	    (cd $(WHEELS) && $(abspath $(BIN))/python -m pytest -m 'not emulated and not slow and not nightly' \
	        $(addprefix $(CURDIR)/tests/,$(OF_WHEELS))); \
	done

# At most four minutes on two cores; `python -m bench --all` measures everything.
bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench

# GROUP: glance (4 minutes), numbers (8) or proof (12). Takes what gpu-libraries has built, if that
# fits; otherwise the build comes on top.
GROUP ?= glance
gpu-check:
	$(PYTHON) -m bench.gpu_check $(OUT) --group $(GROUP)

# Builds without a GPU what gpu-check needs on one of compute capability ARCH, into
# build/gpu-libraries, and prints the size: the folder travels with the sources.
ARCH ?= 90
gpu-libraries:
	$(MAKE) .venv-cuda/torch.txt $(CUDA)
	PYTORCH_NVCC=$(CACHED_NVCC) .venv-cuda/bin/python -m bench.build --architecture $(ARCH)

lint: $(VENV)/lint.txt
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy fusedrnn
	@echo '$(BIN)/clang-format --dry-run -Werror, of C++ and CUDA'
	@$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/lint.txt
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

clean: # keeps downloads
	rm -rf .venv*/*.stamp build *.egg-info fusedrnn/*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# One stamp per extra. Only what runs the compiled code has to wait for it. pip shows nothing of a
# build, so its words go to a file, which is shown if it fails; make says how far it is.
$(VENV)/test.stamp $(VENV)/bench.stamp: $(CPP) build/built-for.txt
$(VENV)/%.stamp: $(VENV)/torch.txt setup.py pyproject.toml $(wildcard build_backend/*.py)
	@echo 'installing fusedrnn[$*] into $(VENV): it is compiled, which takes minutes'
	@$(PROGRESS) $(VENV)/install.log $(PIP) install --verbose --editable '.[$*]'
	@touch $@

# mypy reads torch's types, and needs nothing of ours compiled.
$(VENV)/lint.txt: $(VENV)/torch.txt Makefile
	@echo 'installing $(LINTERS) into $(VENV)'
	@$(PIP) install --quiet $(LINTERS)
	@touch $@

# Records which environment built the libraries in the source tree: another one builds its own.
build/built-for.txt: FORCE
	@mkdir -p build; echo '$(VENV)' | cmp --quiet - $@ || echo '$(VENV)' > $@

# Records which torch is installed. torch comes first, because the package is compiled against it.
$(VENV)/torch.txt: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp --quiet - $@ || { \
	    echo 'installing $(TORCH) into $(VENV): hundreds of megabytes, or gigabytes with CUDA'; \
	    $(PROGRESS) $(VENV)/torch.log \
	        $(PIP) install '$(TORCH)' 'setuptools>=77' ninja pybind11 && echo '$(TORCH)' > $@; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or \
	    sys.exit("fusedrnn: Python 3.10 or newer is needed, found %d.%d" % sys.version_info[:2])'
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
