# Everything a fresh machine needs is done by the targets themselves; nothing has to be installed first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test soak check tests browser proxy bench evidence tables install clean

demo: $(VENV)/.demo-ready  ## five unlike encoders learn together on embedded data (about 3 minutes)
	$(BIN)/hetero-ssfl demo

test: check tests  ## format, lint, types, import arrows, tests

tests: $(VENV)/.dev-ready $(VENV)/.compiled
	env PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

soak: $(VENV)/.dev-ready $(VENV)/.compiled  ## the tests that take minutes each: programs killed, networks cut, large messages
	env PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m soak --durations=10

check: $(VENV)/.dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

APT := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends

browser:  ## installs Chromium (Debian, as root) for the tests that look at the report page; without one they are skipped
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ apt-get update -qq && $(APT) chromium fonts-dejavu-core; } >/dev/null 2>&1 || \
	echo "Chromium cannot be installed here: the tests that look at the report page will be skipped"

proxy:  ## installs nginx (Debian, as root) for the tests of a deployment's proxy; without it they are skipped
	@PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null && exit 0; \
	{ $(APT) nginx || { apt-get update -qq && $(APT) nginx; }; } >/dev/null 2>&1 || \
	echo "nginx cannot be installed here: the tests of a deployment's proxy will be skipped"

BENCHMARKS := overhead training learning views consensus bytes server secure probe startup engines scale

bench: $(VENV)/.bench-ready  ## each prints ratios against baselines measured in the same run; then all in one table
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py; done
	$(BIN)/python benchmarks/summary.py

PAPER := $(BIN)/hetero-ssfl paper --scale workstation --keep results --jobs 2 --set engine.workers=1

evidence: $(VENV)/.demo-ready  ## arms, sweeps and trials of docs/results.md that are not kept below results/ (hours, resumable)
	$(BIN)/python experiments/arms.py --seeds 3
	set -e; for sweep in "RAD size" "local epochs" mu kernel; do $(BIN)/python experiments/arms.py --sweep "$$sweep" --seeds 2; done
	$(BIN)/python experiments/arms.py --table --write docs/results.md --figure docs/assets/arms.svg
	$(BIN)/python experiments/selection.py

# Kept runs of other settings are refused: after new trials, put their winners into studies/paper/cells.toml before the tables are run.
tables: $(VENV)/.demo-ready  ## the paper's tables at workstation scale, as far as they are not kept (hours, resumable)
	$(PAPER) table1 --seeds 3 --only CIFAR-10
	$(PAPER) table4 --seeds 3
	$(PAPER) table2 --seeds 3 --only CIFAR-10
	set -e; for table in table1 table2 table3; do $(PAPER) $$table --seeds 2; done
	$(BIN)/python experiments/tables.py --write results/tables.md

install: $(VENV)/.dev-ready

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The pip that comes with Python may be years old, and takes twice as long.
$(VENV)/.pip-ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "$(PYTHON) is older than Python 3.11. Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "installing torch, Flower and what they need into $(VENV): about 1 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.demo-ready: $(VENV)/.pip-ready pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/.dev-ready: $(VENV)/.pip-ready pyproject.toml constraints.txt
	$(PIP) --no-compile -e ".[dev]"
	touch $@ $(VENV)/.demo-ready

# pip would compile all modules of so many packages on one core. One import compiles those that every test process needs
# (the rest when first imported), also where Python is told not to write bytecode.
IMPORTED := torch, flwr.supernode.cli, flwr.superlink.cli, pandas, pytest, hypothesis, sklearn.datasets, \
  matplotlib.figure, hetero_ssfl.cli, hetero_ssfl.federation.client.app
$(VENV)/.compiled: $(VENV)/.dev-ready
	env PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import $(IMPORTED)"
	touch $@

EXTRAS := simulation timm tensorboard onnx heic medical
.PHONY: $(EXTRAS)
$(EXTRAS): $(VENV)/.demo-ready  ## one of the extras, beside the tested versions of all else
	$(PIP) -e ".[$@]"

$(VENV)/.bench-ready: $(VENV)/.demo-ready
	$(PIP) -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
