# Each target sets up what it needs in .venv (tools/setup); the second time that takes no time.
# PYTHON=…   the interpreter to use (3.11 or newer); its torch is used if it has one
# ARGS=…     passed on: make test ARGS='-k nonfinite', make demo ARGS=diverge

.PHONY: help demo picture first-ten-minutes test check lint type format docs bench torture peers matrix rule-quality clean setup
.DEFAULT_GOAL := help

help:
	@echo 'make demo     watch three real trainings: one is left alone, one is stopped, one asks first (under two minutes)'
	@echo 'make test     all tests; those on Kafka start a real broker if Java 17 and Maven are there'
	@echo 'make check    what CI runs: lint, types, tests'
	@echo 'make first-ten-minutes  type what README.md shows, in a fresh environment, and see whether it is true'
	@echo 'make picture  make docs/images/demo.svg and page.png from real runs'
	@echo 'make docs     the documentation as a site, in docs/_build'
	@echo 'make bench    the benchmarks of docs/explanation/performance.md (long)'
	@echo 'make torture  the long forms of the tests that kill things (long)'
	@echo 'make peers    tests against real services of others; some are built first, once, in minutes (~/.cache/tocsin); Slurm: tools/setup-peers'
	@echo 'make matrix   rule-quality, then tests/matrix with each torch from 2.4 to the newest; some GB each, in TOCSIN_MATRIX'
	@echo 'make rule-quality  all rules on all small trainings, healthy and with faults; writes docs/explanation/rule-quality.md'
	@echo 'make clean    remove .venv and all caches'

setup:
	@PYTHON='$(PYTHON)' tools/setup

demo: setup
	@.venv/bin/tocsin demo $(ARGS)

picture: setup
	@.venv/bin/python tools/docs/demo_picture.py docs/images/demo.svg
	@.venv/bin/python tools/docs/page_picture.py docs/images/page.png

first-ten-minutes: setup
	@.venv/bin/python tools/first-ten-minutes $(ARGS)

# With bytecode kept, whatever the environment says: hundreds of processes import the same modules.
test: setup
	@PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest --numprocesses 4 --dist worksteal --durations=25 $(ARGS)

lint: setup
	@.venv/bin/ruff check . tools/first-ten-minutes tools/matrix tools/recorded-issues tools/rule-examples
	@.venv/bin/ruff format --check . tools/first-ten-minutes tools/matrix tools/recorded-issues tools/rule-examples

format: setup
	@.venv/bin/ruff check --fix . tools/first-ten-minutes tools/matrix tools/recorded-issues tools/rule-examples
	@.venv/bin/ruff format . tools/first-ten-minutes tools/matrix tools/recorded-issues tools/rule-examples

type: setup
	@.venv/bin/mypy

check: lint type test

docs: setup
	@.venv/bin/sphinx-build --nitpicky --fail-on-warning --keep-going --quiet docs docs/_build $(ARGS)
	@echo "open $(CURDIR)/docs/_build/index.html"

bench: setup
	@.venv/bin/python benchmarks/all.py $(ARGS)

torture: setup
	@TOCSIN_TORTURE=1 .venv/bin/python -m pytest -m torture $(ARGS)

peers: setup
	@PYTHONPATH=tests .venv/bin/python -m support.kubernetes.build
	@.venv/bin/python -m pytest -m peers $(ARGS)

rule-quality: setup
	@PYTHONPATH=tests .venv/bin/python -m fixtures.runs.matrix docs/explanation/rule-quality.md

matrix: rule-quality
	@.venv/bin/python tools/matrix $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis docs/_build
