# Every target sets up .venv first; scripts/setup.sh returns at once where that is already done.
PROMPT ?= Why is the sky blue? Answer in two sentences.
ARGS ?=
PYTEST := .venv/bin/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint bench gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create or refresh .venv (no network needed while pyproject.toml is unchanged)
	@scripts/setup.sh

demo: setup ## stream a chat answer from SmolLM2-135M (PROMPT="..." to ask something else)
	@.venv/bin/specax-generate --model=smollm2 --chat --prompt="$$PROMPT" --stats $(ARGS)

test: setup ## the fast suite (ARGS="tests/paged -k fork" to narrow it)
	$(PYTEST) -n 2 -m "not slow" $(ARGS)

test-slow: setup ## long proofs and runs with the real model
	$(PYTEST) -m slow $(ARGS)

lint: setup ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: setup ## measure decode and prefill rates (ARGS="--..." for specax-bench's flags)
	.venv/bin/specax-bench --model=smollm2 $(ARGS)

gpu-check: setup ## compile for H200s, without one, and check what comes out (ARGS="--...")
	@scripts/gpu_check.sh $(ARGS)

clean: ## remove .venv and everything that tools wrote here (the model cache stays)
	rm -rf .venv .gpu-compilers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Through the environment, so that quotes in a prompt are not the shell's business.
export PROMPT
