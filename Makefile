# `make test` needs nothing but Python 3.11+ and make: it creates .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Offline, and no telemetry: nothing in the suite may depend on a hub.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some containers set it; then every process that a test starts compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# Processes that share the suite, and minutes that `make fuzz` may take.
JOBS ?= 2
MINUTES ?= 10
SEED ?=
# Test files of a corner, all of them if empty; extras that `make test-resolve` checks.
TESTS ?=
EXTRAS := train serve ray vllm docs dev train,serve,ray,vllm

.PHONY: test test-slow test-all test-oldest test-newest test-resolve snapshots fuzz lint wheel docs format install quickstart results clean help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(VENV)/.installed ## create .venv and install the package for development

# torch first and by its exact version: a range would take the newest build with its CUDA packages.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

# Test files are handed out whole, so that each builds its models and folders once.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

test: install ## run the tests, except for the slow ones: the same order and the same examples every time
	$(PYTEST) -m "not slow"

test-slow: install ## run the tests that start processes again and again, or train many models
	$(PYTEST) -m slow

test-all: install ## run everything, also what needs a browser and the benchmarks' files, in a fresh order
	$(PYTEST) --everything --randomly-seed=default

# The ends of the version ranges: an environment each in build/. A package's first line counts, so a corner's file
# replaces versions of constraints.txt.
build/%/.installed: constraints-%.txt constraints.txt pyproject.toml
	rm -rf build/$* && mkdir -p build/$*
	awk -F== '!seen[$$1]++' constraints-$*.txt constraints.txt > build/$*/constraints.txt
	$(PYTHON) -m venv build/$*
	build/$*/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	build/$*/bin/pip install --quiet --constraint build/$*/constraints.txt --editable ".[dev]" $(ALSO)
	@touch $@

# The head of TRL 1.15 consists of Triton kernels, which Triton can interpret on a CPU.
build/oldest/.installed: ALSO = triton

TEST_CORNER = -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" $(TESTS)

test-oldest: build/oldest/.installed ## run the tests with the oldest Transformers and TRL; TESTS=tests/training runs a part
	TRITON_INTERPRET=1 build/oldest/bin/python $(TEST_CORNER) -W ignore::RuntimeWarning:triton.runtime.interpreter

test-newest: build/newest/.installed ## run the tests with the newest Transformers and TRL; TESTS=tests/training runs a part
	build/newest/bin/python $(TEST_CORNER)

# Nothing is installed. An exact torch, since a newer one would come with packages for CUDA.
test-resolve: ## check that every extra can be installed into an empty environment, alone and all together
	rm -rf build/resolve && $(PYTHON) -m venv build/resolve
	@for extras in $(EXTRAS); do \
		echo "catto[$$extras]"; \
		build/resolve/bin/pip install --dry-run --quiet "$$(grep '^torch==' constraints.txt)" ".[$$extras]" || exit 1; \
	done

snapshots: install ## write again what each command prints, tests/cli/snapshots; read the difference
	$(BIN)/python -m pytest -n0 -q tests/cli/test_snapshots.py --update-snapshots

fuzz: install ## explore the property tests with fresh seeds for MINUTES (10); SEED=n repeats one round
	$(BIN)/python tests/fuzz.py $(MINUTES) $(SEED)

results: install ## write the tables and the figure of the results from the study's summary
	$(BIN)/python -m study.write

quickstart: install ## compare SFT, DPO, CATTO and outcome on the embedded world: a table and a page
	$(BIN)/catto run quickstart

lint: install ## ruff and mypy, as the gate runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

# The wheel is built from the source archive, which shows that the archive is complete. It is tried in an environment of
# its own and in another folder, so that nothing but the wheel can be found.
wheel: ## build and check the source archive and the wheel; try the wheel in a clean environment, without torch
	rm -rf build/wheel && mkdir -p build/wheel/try
	$(PYTHON) -m venv build/wheel/tools
	build/wheel/tools/bin/pip install --quiet --constraint constraints.txt build twine
	build/wheel/tools/bin/python -m build --outdir build/wheel . > build/wheel/build.log || (cat build/wheel/build.log; exit 1)
	build/wheel/tools/bin/twine check --strict build/wheel/*.tar.gz build/wheel/*.whl
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet --constraint constraints.txt build/wheel/*.whl
	printf '{"confidence": 0.9, "correct": %s}\n' true false true > build/wheel/try/answers.jsonl
	cd build/wheel/try && ../venv/bin/catto run quickstart --help
	cd build/wheel/try && ../venv/bin/catto plan quickstart
	cd build/wheel/try && ../venv/bin/catto measure answers.jsonl --figure reliability.svg

# Warnings are errors: a link without a target, a page outside the contents, a docstring that cannot be rendered.
docs: install ## build the site in build/docs from README, docs/ and the docstrings; a broken link fails
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet --conf-dir docs . build/docs

format: install ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
