# Each target is one line that CI runs too.
.PHONY: test slow lint types contracts docs ci
test:
	uv run pytest -n 2
slow:
	uv run pytest -n 2 --slow -m slow
lint:
	uv run ruff check . && uv run ruff format --check . && uv run codespell
types:
	uv run pyright
contracts:
	uv run lint-imports
docs:
	uv run sphinx-build -W -q -b html docs docs/_build/html
ci:
	bash .ci/run
