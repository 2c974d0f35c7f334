# What a contributor runs. CONTRIBUTING.md says when.
.PHONY: setup test lint docs nightly

setup: # installs kvt with all extras, and the checks before every commit
	pip install -e ".[dev]"
	pre-commit install

test: # the fast tests
	pytest

lint: # style, types, imports, dependencies, spelling
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	deptry kvt experiments benchmarks
	codespell

docs: # build/site/index.html
	python -m sphinx -W docs build/site

nightly: # the slow tests: hours
	.ci/nightly
