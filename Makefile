BIN := .venv/bin

.PHONY: check format test

check: ## style, types, directions of imports, shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck scripts/*.sh tepo_megatron/launch/templates/*.sh .ci/run

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test:
	bash scripts/test.sh
