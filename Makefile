# The project's verbs. `make` alone lists them.
VENV   := .venv
# Compiled modules are kept: without them every test process compiles the whole product anew.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is missing: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# `compat` adds the checkout to the path. Otherwise each Python process would first load a finder of modules: 11 ms of CPU.
$(VENV)/server: $(VENV)/python requirements/server.txt pyproject.toml
	$(PIP) install -q --require-hashes -r requirements/server.txt
	$(PIP) install -q --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/dev: $(VENV)/server requirements/dev.txt
	$(PIP) install -q --require-hashes -r requirements/dev.txt
	@touch $@

$(VENV)/browser: $(VENV)/dev requirements/browser.txt
	$(PIP) install -q --require-hashes -r requirements/browser.txt
	@touch $@

$(VENV)/mutants: $(VENV)/dev requirements/mutants.txt
	$(PIP) install -q --require-hashes -r requirements/mutants.txt
	@touch $@

up: $(VENV)/server  ## start everything on this machine; Ctrl-C stops it
	@exec $(BIN)/python -m cyborgweb.server.supervisor --leash

# Folders whose tests are all of other lanes are not even imported.
SPREAD := --dist worksteal $(addprefix --ignore=tests/,system qemu browser)
CHECKED := not system and not exhaustive and not qemu and not browser
FAST := $(CHECKED) and not slow
# Temporary files of the fast tests are in memory, if there is enough.
IN_MEMORY := TMPDIR=$$($(BIN)/python -m tests.support.temporary)
# Test processes: most lanes wait as much as they compute, so one more than the cores of a small machine.
TEST_PROCESSES ?= 3
# Each has a product and a Chromium of its own.
BROWSER_PROCESSES ?= 1

test: $(VENV)/dev  ## unit, database, HTTP and socket tests
	$(IN_MEMORY) $(BIN)/python -m pytest -m "$(FAST)" $(SPREAD) -n $(TEST_PROCESSES)

check: $(VENV)/dev  ## while you work: style, types, and the tests of the packages that differ from the last commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(IN_MEMORY) $(BIN)/python -m pytest -m "$(CHECKED)" $(SPREAD) -n $(TEST_PROCESSES) $$($(BIN)/python -m tests.changed)

test-system: $(VENV)/dev  ## start the whole product, kill its parts, see that nothing is lost
	$(BIN)/python -m pytest -m "system or exhaustive or slow or hypothesis" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

LANE ?= test
slowest: $(VENV)/dev  ## run a lane (LANE=test-system, …) and print which of its modules and tests took the longest
	@PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -p tests.support.slowest" $(MAKE) --no-print-directory $(LANE)

OUTAGES := tests/system/test_slow_services.py
LONGER := tests/accelerators/requests/test_binding_machine.py tests/system/test_race.py tests/system/test_fleet.py
ALONE := hostile_and_slow_neighbours
test-long: $(VENV)/dev  ## the scenarios that CI runs shortened, at full length: outages of an hour, a thousand rounds; some two hours
	TEST_LONG=1 $(BIN)/python -m pytest $(OUTAGES) -m system -n 8 --dist load  # eight outages of an hour, side by side
	TEST_LONG=1 $(BIN)/python -m pytest $(LONGER) -k "not $(ALONE)" -n $(TEST_PROCESSES) --dist load
	TEST_LONG=1 $(BIN)/python -m pytest tests/system/test_fleet.py -k $(ALONE)  # it compares latencies: nothing beside it

test-qemu: $(VENV)/dev  ## boot a real kernel with simulated hardware, plug and pull, see it in the API
	$(BIN)/python -m pytest tests/qemu -m qemu

test-browser: $(VENV)/browser  ## an operator's day in a real Chromium; pictures of the main pages into var/screens
	$(BIN)/python -m pytest tests/browser -m browser -n $(BROWSER_PROCESSES) --dist loadfile --no-loadscope-reorder

deps-browser: $(VENV)/browser  ## what test-browser needs: Playwright, and Debian's Chromium (as root) where there is no browser yet
	@$(BIN)/python -m tests.browser.chromium

deps-sim:  ## what simulated hardware and machines need: Debian's packages (as root), a kernel and nginx into .sim
	@$(PYTHON) -m tests.qemu.prepare
	@$(PYTHON) -m tests.system.simulated

environments: $(VENV)/dev  ## other projects' software for test-system: Keystone, Nova, the clients
	$(BIN)/python -m tests.system.environments

lint: $(VENV)/dev  ## style and types; import contracts and generated files are checked by tests/test_house.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev  ## measure every figure at smoke size, each against its ceiling in the same run
	$(BIN)/python -m tests.bench

bench-full: $(VENV)/dev  ## the same at published sizes
	$(BIN)/python -m tests.bench --full

bench-check: $(VENV)/dev  ## fail when a row of the last `make bench` does not hold, and name it
	@$(BIN)/python -m tests.bench --check

SAMPLE ?= 400
SEED   ?= 1
mutants: $(VENV)/mutants  ## plant SAMPLE faults in copies of the core, see that tests fail; killed: again with ARGS=--resume
	@$(BIN)/python -m tests.mutants --sample $(SAMPLE) --seed $(SEED) $(ARGS)

N        ?= 1000
SCENARIO ?= cold-start
fleet: $(VENV)/dev  ## N simulated agents against the whole product, SCENARIO=… happens to them; --help: make fleet N=-h
	@$(BIN)/python -m tests.fleet $(N) --scenario $(SCENARIO)

docs: $(VENV)/dev  ## write what is generated from the code
	$(BIN)/python manage.py configuration_page > docs/configuration.md
	$(BIN)/python manage.py openapi_page > docs/openapi.yaml
	$(BIN)/python manage.py policy_sample > docs/policy.yaml.sample

manual: $(VENV)/server  ## the manual as files that need no server, into build/manual
	$(BIN)/python manage.py manual build/manual

lock: $(VENV)/dev  ## resolve the locked requirements anew (needs uv)
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate pyproject.toml -o requirements/agent.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate pyproject.toml requirements/build.in --extra server -o requirements/server.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate pyproject.toml requirements/build.in --extra server --extra dev -c requirements/server.txt -o requirements/dev.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate requirements/browser.in -c requirements/dev.txt -o requirements/browser.txt
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate requirements/mutants.in -c requirements/dev.txt -o requirements/mutants.txt
	for name in requirements/system/*.in; do uv pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate $$name -o $${name%.in}.txt || exit 1; done

.PHONY: help up test check slowest test-long test-system test-qemu test-browser deps-browser deps-sim environments lint bench bench-full bench-check mutants fleet docs manual lock
