# Everything a fresh machine needs is done by the targets themselves; nothing has to be installed first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check browser bench install clean

demo: $(VENV)/.demo-ready  ## five unlike encoders learn together on embedded data (about 3 minutes)
	$(BIN)/hetero-ssfl demo

test: check browser  ## format, lint, types, import arrows, tests
	$(BIN)/python -m pytest

check: $(VENV)/.dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# For the tests that look at the report page; without a browser they are skipped.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
	  --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || \
	echo "no Chromium, and it cannot be installed here: the tests that look at the report page will be skipped"

BENCHMARKS := overhead training views consensus bytes server probe startup engines scale

bench: $(VENV)/.bench-ready  ## each prints ratios against baselines measured in the same run; then all in one table
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py; done
	$(BIN)/python benchmarks/summary.py

install: $(VENV)/.dev-ready

# torch first and by itself: its version decides whether gigabytes of CUDA packages are pulled in.
$(VENV)/.demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev-ready: $(VENV)/.demo-ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(VENV)/.bench-ready: $(VENV)/.demo-ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
