# Everything a developer or a CI job runs. Each target works alone on a fresh machine with Python >= 3.11, git and make.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# the first interpreter that can make a virtual environment; 3.11 is what the tests run with
USABLE := import sys, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON_BASE ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c '$(USABLE)' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# many small processes: one thread each is fastest and leaves the machine usable
export OMP_NUM_THREADS ?= 1
# files of tests run beside each other, one more than there are cores, because many wait for processes that they have
# started; the tests of one file one after the other, because they share these. The longest files come first
# (tests/conftest.py)
# nproc counts by OMP_NUM_THREADS where that is set, as it is within `make nightly`
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc)
# the tests start hundreds of interpreters: these compile the same modules only once, whatever the caller's shell says
unexport PYTHONDONTWRITEBYTECODE
SPREAD := -n $$(($(WORKERS) + 1)) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help format lint types test test-change test-slow test-thorough nightly test-harm harm-table test-dist test-monitoring retest detection recordings recorded sample held-out programs bench bench-hangs demo docs dashboards rules up down size check triton site compat gpu pictures

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON_BASE)" || { echo "ddpdebug needs Python 3.11 or later with venv (Debian: python3-venv)"; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON_BASE); the first time this loads torch"
	test -x $(PYTHON) || $(PYTHON_BASE) -m venv $(VENV)
	@# what is imported is compiled when it is
	$(PYTHON) -m pip install --quiet --no-compile -c constraints.txt torch
	$(PYTHON) -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# beside .venv: with it torch would choose other ways in other tests
.triton/.installed: $(STAMP)
	rm -rf .triton
	$(PYTHON) -m pip install --quiet --no-deps --target .triton -c constraints.txt triton
	touch $@

triton: .triton/.installed ## Triton for the test of its kernel in its interpreter (270 MB)

format: $(STAMP) ## format the code and sort its imports
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --select I --fix .

lint: $(STAMP) types ## ruff (all rules, reasons in pyproject.toml), formatting and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(STAMP) ## mypy, strict
	$(PYTHON) -m mypy

test: $(STAMP) ## the tests (five minutes on two cores)
	$(PYTHON) -m pytest -q $(SPREAD) -m "not slow" --durations=12

test-change: $(STAMP) ## what CI runs for each change: the tests, and of the slow ones those that are marked `smoke`
	$(PYTHON) -m pytest -q $(SPREAD) -m "(not slow or smoke) and not thorough" --durations=12

test-slow: $(STAMP) ## the slow ones: hangs, whatever breaks, Slurm, a job against a real Prometheus
	$(PYTHON) -m pytest -q $(SPREAD) -m "slow and not thorough" --durations=12

test-thorough: $(STAMP) ## more combinations of what the slow ones prove
	$(PYTHON) -m pytest -q $(SPREAD) -m thorough --durations=12

# Every part runs, also when one before it has failed: a night shows all that is broken
NIGHTLY := triton test test-slow test-thorough detection held-out programs harm-table
nightly: ## everything that is proven, with the pages that it writes: before a release, and once a night (hours)
	@failed=""; for part in $(NIGHTLY); do \
		printf '\n== %s, %s ==\n' "$$part" "$$(date -u +%H:%M:%S)"; \
		DDPDEBUG_REQUIRE_TRITON=1 $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; \
	printf '\n== nightly, %s: failed:%s ==\n' "$$(date -u +%H:%M:%S)" "$${failed:- nothing}"; test -z "$$failed"

retest: $(STAMP) ## as a diagnosis: run the tests that failed last time alone; they have failed all the same
	$(PYTHON) -m pytest -q --last-failed --last-failed-no-failures none

test-harm: $(STAMP) ## training is the same with and without ddpdebug, whatever breaks
	$(PYTHON) -m pytest -q tests/harm

harm-table: $(STAMP) ## run the situations of docs/harm.md and write what was seen into it
	$(PYTHON) tests/harm/pairs.py --write docs/harm.md

test-dist: $(STAMP) ## only the tests that start several ranks
	$(PYTHON) -m pytest -q -m "jobs or ranks"

test-monitoring: $(STAMP) ## a real job against a real Prometheus and Alertmanager, where they are installed
	$(PYTHON) -m pytest -q tests/monitoring tests/reports tests/grafana

detection: $(STAMP) ## run the corpus of faults and healthy scripts, print the score, write docs/detection.md
	@# one more than there are cores: ranks wait for each other
	$(PYTHON) tests/detection/score.py --jobs $$(($(WORKERS) + 1)) --require 0.95 --write docs/detection.md

recordings: $(STAMP) ## record the runs of the corpus that have no recording of today, or those of ONLY=sync205,num
	$(PYTHON) tests/detection/score.py --record $(if $(ONLY),--only $(ONLY),--stale) --jobs $$(($(WORKERS) + 1))

recorded: $(STAMP) ## judge the recorded runs of the corpus by the rules of today: nothing is run
	$(PYTHON) tests/detection/score.py --recorded --jobs $(WORKERS)

sample: $(STAMP) ## run 40 runs of the corpus, always the same, and at most 40 of those without a recording of today
	$(PYTHON) tests/detection/score.py --sample 40 --jobs $$(($(WORKERS) + 1)) --require 0.95

held-out: $(STAMP) ## run the scripts that who writes rules does not read, print totals, write them into docs/detection.md
	$(PYTHON) tests/detection/score.py --held-out --jobs $$(($(WORKERS) + 1)) --require 0.5 --write docs/detection.md

programs: $(STAMP) ## run programs in the manner of public ones, healthy and with a fault each, write docs/programs.md
	$(PYTHON) tests/programs/run.py --write docs/programs.md

compat: $(STAMP) ## a part of the tests and the corpus under other versions of torch (gigabytes), write docs/compatibility.md
	$(PYTHON) -m tools.compat --write docs/compatibility.md

# Triton comes with the torch for CUDA; for a torch without it is asked for, and may be missing: the page then says so.
# A machine without a device is told so before anything is run
gpu: $(STAMP) ## what needs CUDA, tests and measurements, on a machine with a GPU, write docs/gpu.md
	@$(PYTHON) -c 'import sys; from tools.gpu import why_not; sys.exit("make gpu: nothing was run: " + why_not() if why_not() else 0)'
	$(PYTHON) -c 'import triton' 2>/dev/null || $(PYTHON) -m pip install --quiet -c constraints.txt triton || true
	$(PYTHON) -m tools.gpu --write docs/gpu.md

bench: $(STAMP) ## what ddpdebug costs, against plain DDP and the naive methods
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/overhead.py --rounds 6
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/overhead.py --rounds 4 --busy 2
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/overhead.py --rounds 4 \
		--first 1 --early 1 --steady 6 --ways plain,again,every-step,forward-probes,all-gather,isfinite,anomaly
	$(PYTHON) benchmarks/short_steps.py
	$(PYTHON) benchmarks/background.py
	$(PYTHON) benchmarks/scaling.py
	$(PYTHON) benchmarks/check.py
	$(PYTHON) benchmarks/modules.py
	$(PYTHON) benchmarks/modules.py --ddp
	$(PYTHON) benchmarks/operations.py --rounds 6
	$(PYTHON) benchmarks/operations.py --device meta
	$(PYTHON) benchmarks/memory.py
	$(PYTHON) benchmarks/scrapes.py
	$(PYTHON) benchmarks/notes.py
	$(PYTHON) benchmarks/hub.py

bench-hangs: $(STAMP) ## after how many seconds hangs are found, with and without load (takes long)
	$(PYTHON) benchmarks/hangs.py --rounds 10

demo: $(STAMP) ## train on 4 CPU ranks, break two things, see them found (about three minutes)
	$(PYTHON) demo/demo.py

docs: $(STAMP) ## regenerate the reference pages in docs/ (findings, metrics, options, patches, thresholds)
	$(PYTHON) tools/documentation.py docs/findings.md docs/metrics.md docs/options.md docs/patches.md docs/thresholds.md

pictures: $(STAMP) ## take the pictures in docs/pictures from real runs (needs chromium; some minutes)
	$(PYTHON) -m tools.pictures

site: $(STAMP) ## make the site of the documentation in build/site; a link or an anchor that leads nowhere is an error
	rm -rf build/site
	$(PYTHON) -m sphinx -W --keep-going --quiet --conf-dir docs . build/site
	@echo "build/site/index.html"

dashboards: $(STAMP) ## make the Grafana dashboards in dashboards/ from their code
	$(PYTHON) -m tools.dashboards dashboards

size: ## print the longest files: an alarm that a person reads, no limit
	@find ddpdebug -name '*.py' -exec wc -l {} + | sort -n | tail -n 16

check: lint test ## what must pass before a change goes in

rules: $(STAMP) ## make the alerts from their code, and the PrometheusRule for Kubernetes from all rules
	$(PYTHON) -m tools.alerts deploy/prometheus/rules deploy/kubernetes/base/prometheusrule.yaml

up: ## start Prometheus, Alertmanager, Grafana, the hub and the demo job in containers (http://127.0.0.1:3000, :8765)
	docker compose -f deploy/compose/compose.yaml up --detach --build

down: ## stop them; the data stays
	docker compose -f deploy/compose/compose.yaml down
