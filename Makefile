# One command per job. Needs python3 with pip, make and git; no environment has to be active.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Folders of the distributions, and of the packages that they hold.
DISTRIBUTIONS := . plugins/products plugins/operations plugins/checks plugins/interplay \
	plugins/layers plugins/firstorder plugins/secondorder plugins/transformers \
	plugins/capture plugins/privacy plugins/attribution plugins/optimizers data compat
PACKAGES := backpack_core plugins/products/backpack_products plugins/operations/backpack_operations \
	plugins/checks/backpack_checks plugins/interplay/backpack_interplay plugins/layers/backpack_layers plugins/firstorder/backpack_firstorder \
	plugins/secondorder/backpack_secondorder plugins/transformers/backpack_transformers \
	plugins/capture/backpack_capture plugins/privacy/backpack_privacy \
	plugins/attribution/backpack_attribution plugins/optimizers/backpack_optimizers data/backpack_data compat/backpack \
	compat/backpack_compat
EXTRAS := testing,cli,dev
DOCS_STAMP := $(VENV)/.docs-installed

PYPROJECTS := $(DISTRIBUTIONS:%=%/pyproject.toml)
# What pip downloads is shown: torch alone takes minutes.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check \
	--constraint constraints.txt

# The pinned tools need it; pip would end in a list of versions that do not fit.
PYTHON_GUARD := import sys; sys.version_info >= (3, 11) or sys.exit( \
	"make env needs Python 3.11 or later, and $(PYTHON) is %d.%d: make env PYTHON=python3.11" \
	% sys.version_info[:2])

# Further arguments for the tests and the benchmarks.
ARGS ?=

.PHONY: help env env-models models docs docs-quick demo test coverage lint format types bench-env bench support build certify clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

env: $(STAMP) ## create .venv with every distribution installed editable

# The build backend goes in first, so that no distribution needs a build environment of its own.
$(STAMP): $(PYPROJECTS) constraints.txt
	@$(PYTHON) -c '$(PYTHON_GUARD)'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) hatchling
	$(PIP_INSTALL) --no-build-isolation \
		$(foreach folder,$(DISTRIBUTIONS),--editable '$(folder)$(if $(filter .,$(folder)),[$(EXTRAS)])')
	@touch $@

# One thread: its tensors are small, and more only compete for cores that others use.
demo: export OMP_NUM_THREADS := 1
demo: $(STAMP) ## run the demonstration
	$(BIN)/python examples/demo.py

# One thread for each worker: more only compete for the same cores.
test: export OMP_NUM_THREADS := 1
test: $(STAMP) ## run the whole test suite
	$(BIN)/python -m pytest -n auto $(ARGS)

# It takes longer, and no test fails by it.
coverage: export OMP_NUM_THREADS := 1
coverage: $(STAMP) ## run it, and list the lines that no test runs
	$(BIN)/python -m pytest -n auto --cov --cov-report=term-missing:skip-covered $(ARGS)

lint: $(STAMP) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## check types
	$(BIN)/mypy --strict $(PACKAGES)

# The peers of the benchmarks. One asks for torchvision, which it only needs for example data, and the
# compatibility layer would take its import name: so neither is here. The tests of what is exchanged
# with curvlinops run here, too; the folder of tests that kronfluence installs would hide ours.
BENCH_PEERS := backpack-for-pytorch unfoldNd opacus curvlinops-for-pytorch einconv linear_operator \
	laplace-torch asdfghjkl torchmetrics lightning-utilities kronfluence
BENCH_NEEDS := hatchling matplotlib lazy-importer opt-einsum scipy scikit-learn jaxtyping tqdm \
	accelerate pytest hypothesis
BENCH_DISTRIBUTIONS := . plugins/products plugins/operations plugins/checks plugins/interplay \
	plugins/layers plugins/firstorder plugins/secondorder plugins/capture plugins/privacy data
BENCH_STAMP := .venv-bench/.installed
BENCH_INSTALL := .venv-bench/bin/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt

bench-env: $(BENCH_STAMP) ## create .venv-bench with the libraries to compare with

$(BENCH_STAMP): $(PYPROJECTS) constraints.txt
	$(PYTHON) -m venv .venv-bench
	$(BENCH_INSTALL) $(BENCH_NEEDS)
	$(BENCH_INSTALL) --no-build-isolation $(BENCH_DISTRIBUTIONS:%=--editable %)
	$(BENCH_INSTALL) --no-deps $(BENCH_PEERS)
	rm -rf .venv-bench/lib/python3.*/site-packages/tests
	@touch $@

bench: $(BENCH_STAMP) ## run the benchmarks, for instance ARGS="--problem 3c3d --quantity BatchGrad"
	.venv-bench/bin/python -m benchmarks $(ARGS)

# Packages whose models are tried. Without them, the tests that need them are skipped.
MODEL_PEERS := transformers peft accelerate lightning
# Tried by `make models` alone.
MORE_MODELS := x-transformers rtdl-revisiting-models perceiver-pytorch zuko e3nn torchdiffeq
MODELS_STAMP := $(VENV)/.models

env-models: $(MODELS_STAMP) ## add the packages whose models are tried to .venv

$(MODELS_STAMP): $(STAMP)
	$(PIP_INSTALL) $(MODEL_PEERS)
	@touch $@

models: $(MODELS_STAMP) ## try every quantity on every model, and write docs/models.md
	$(PIP_INSTALL) $(MORE_MODELS)
	$(BIN)/python -m benchmarks.models --write docs/models.md $(ARGS)

support: $(STAMP) ## regenerate the support matrix of the documentation
	$(BIN)/python docs/make_support_matrix.py

# One of the gallery's scripts compares with Opacus, which asks for torchvision, but needs none of it.
$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	$(PIP_INSTALL) --no-deps opacus opt-einsum
	@touch $@

SPHINX := $(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet $(ARGS)

docs: $(DOCS_STAMP) ## build the site into docs/_build/html, gallery included (minutes)
	$(SPHINX) docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

docs-quick: export BACKPACK_GALLERY := 0
docs-quick: $(DOCS_STAMP) ## build the site without running the gallery (seconds)
	$(SPHINX) docs docs/_build/quick
	$(BIN)/python docs/check_site.py docs/_build/quick

build: $(STAMP) ## build sdist and wheel of every distribution into dist/
	$(foreach folder,$(DISTRIBUTIONS),$(BIN)/python -m build --no-isolation --outdir dist $(folder) &&) true

# Distributions that declare plugins, and the tests that judge their classes.
CERTIFIED := $(filter-out plugins/products plugins/capture plugins/privacy plugins/attribution plugins/optimizers,\
	$(filter plugins/%,$(DISTRIBUTIONS)))
JUDGES := tests/conformance tests/architectures/test_transformers_rules.py

certify: export PYTEST_ADDOPTS := -n auto
certify: export OMP_NUM_THREADS := 1
certify: $(MODELS_STAMP) ## build dist/ anew, and put a certificate into the wheel of each plugin
	rm -rf dist
	$(MAKE) build
	$(BIN)/backpack certify $(CERTIFIED) $(JUDGES:%=--tests %) --wheel dist
	rm -f plugins/*/*/backpack-certificate.json

clean: ## remove the environment and everything generated
	rm -rf docs/_build docs/api docs/gallery
	rm -rf $(VENV) .venv-bench dist .coverage .coverage.* htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
