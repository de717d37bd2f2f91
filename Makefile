BIN := .venv/bin

.PHONY: check docs format test test-fast

check: ## style, types, directions of imports, shell scripts, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/sizes.py
	$(BIN)/shellcheck scripts/*.sh tepo_megatron/launch/templates/*.sh .ci/run

docs: ## the documentation and the pages of the public names, in site/
	bash scripts/build_docs.sh

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test:
	bash scripts/test.sh

test-fast: ## while you work: the quick ones of tests/unit
	bash scripts/test.sh --fast
