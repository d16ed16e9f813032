# Two targets do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SAMPLE := assets/audio/welcome.wav
PORT ?= 8080
# Programs that the tests of the training data use; the demo needs none.
TEST_PACKAGES := libegl1 libgl1-mesa-dri espeak-ng espeak-ng-data flite festival \
  festvox-us-slt-hts festvox-kallpc16k festvox-kdlpc16k festvox-italp16k festvox-itapc16k \
  festvox-ca-ona-hts festvox-suopuhe-lj festvox-suopuhe-mv festvox-czech-dita festvox-czech-machac \
  chromium nodejs

.DEFAULT_GOAL := help
.PHONY: help demo render test lint types unit wheel soak readme system-packages clean

help:
	@echo "make demo   serve the live avatar and print the address of its page (PORT=8080)"
	@echo "make render render a talking face from $(SAMPLE) to out/demo.mp4"
	@echo "make test   lint, strict types, tests, the wheel in an empty environment"
	@echo "make soak   the long trials"

$(VENV)/python-ok:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rtgen needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo-ok: $(VENV)/python-ok pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/test-ok: $(VENV)/python-ok pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/demo-ok

demo: $(VENV)/demo-ok
	$(BIN)/rtgen serve --port $(PORT)

render: $(VENV)/demo-ok
	@mkdir -p out
	$(BIN)/rtgen render --audio $(SAMPLE) --out out/demo.mp4 --force

test: system-packages lint types unit wheel

lint: $(VENV)/test-ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test-ok
	$(BIN)/mypy

unit: $(VENV)/test-ok
	$(BIN)/pytest -m "not soak"

# The wheel must carry its models: install it alone and render from another folder.
wheel: $(VENV)/test-ok
	rm -rf dist build/wheel-venv build/wheel-run
	$(BIN)/python -m build --wheel --outdir dist >/dev/null
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint constraints.txt dist/rtgen-*.whl
	mkdir -p build/wheel-run
	cp $(SAMPLE) build/wheel-run/speech.wav
	cd build/wheel-run && ../wheel-venv/bin/rtgen info && \
	  ../wheel-venv/bin/rtgen render --audio speech.wav --out talk.mp4
	test -s build/wheel-run/talk.mp4
	rm -rf build/wheel-venv build/wheel-run

soak: $(VENV)/test-ok
	$(BIN)/pytest -m soak

readme: $(VENV)/test-ok
	$(BIN)/python -m pipelines.readme

# As root on Debian the packages are installed; elsewhere the line is printed.
system-packages:
	@missing=""; for package in $(TEST_PACKAGES); do \
	  dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	elif command -v dpkg >/dev/null; then \
	  echo "please run: sudo apt-get install$$missing"; exit 1; \
	else \
	  echo "note: tests of training data are skipped without:$$missing"; fi

clean:
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache
