# Everything happens in .venv, which is made on first use. PYTHON and TORCH may be given:
#   make test PYTHON=python3.12 TORCH=torch==2.14.1
# Only gpu-check takes PYTHON as it is, with the torch for CUDA that it holds, and no network.

PYTHON ?= python3
TORCH ?= torch==2.13.0
OUT ?= build/gpu-check

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu tests/*/*.cpp)

.PHONY: test bench gpu-check lint format clean FORCE

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest

bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench

gpu-check:
	$(PYTHON) -m bench.gpu_check $(OUT)

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
	rm -rf $(VENV)/*.stamp build *.egg-info fusedrnn/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# One stamp per extra. Only what runs the compiled code has to wait for it.
$(VENV)/test.stamp $(VENV)/bench.stamp: $(CPP)
$(VENV)/%.stamp: $(VENV)/torch.txt setup.py pyproject.toml $(wildcard build_backend/*.py)
	$(PIP) install --editable '.[$*]'
	@touch $@

# Names the torch that is installed. torch comes first, because the package is compiled against it.
$(VENV)/torch.txt: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp --quiet - $@ || \
	    { $(PIP) install '$(TORCH)' 'setuptools>=77' ninja pybind11 && echo '$(TORCH)' > $@; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or \
	    sys.exit("fusedrnn: Python 3.10 or newer is needed, found %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
