# Everything a contributor needs. Each target makes the virtual environment it runs in.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Bytecode is kept, and made of what is imported alone: to make all of it takes longer than to
# install.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test lint types unit slow bench peers docs dist clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/winnow demo

# Types, on one core, next to the tests.
test: lint
	$(MAKE) --no-print-directory -j 2 types unit

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/basedpyright --level error

unit: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

bench: $(INSTALLED)
	$(BIN)/python benchmarks/selection.py
	$(BIN)/python benchmarks/regression.py
	$(BIN)/python benchmarks/classification.py
	$(BIN)/python benchmarks/deep.py
	$(BIN)/python benchmarks/latent.py --seeds 0 1 2
	$(BIN)/python benchmarks/predict.py

# GPflow and GPyTorch, each in a virtual environment of its own; hours on two cores.
PEERS := benchmarks/peers
SWEEP := 16,32,64,128,256,512
peers:
	test -x $(PEERS)/.venv-gpflow/bin/python || $(PYTHON) -m venv $(PEERS)/.venv-gpflow
	test -x $(PEERS)/.venv-gpytorch/bin/python || $(PYTHON) -m venv $(PEERS)/.venv-gpytorch
	$(PEERS)/.venv-gpflow/bin/pip install --quiet -r $(PEERS)/requirements-gpflow.txt
	$(PEERS)/.venv-gpytorch/bin/pip install --quiet -r $(PEERS)/requirements-gpytorch.txt
	for data in concrete energy kin8nm; do \
	  for start in kmeans greedy random; do \
	    $(PEERS)/.venv-gpflow/bin/python $(PEERS)/gpflow_sgpr.py --data-dir "$$WINNOWGP_DATA" \
	      --dataset $$data --start $$start --points $(SWEEP) --seed 0 \
	      --out benchmarks/results/regression/gpflow-$$data.jsonl || exit 1; \
	  done; \
	  $(PEERS)/.venv-gpytorch/bin/python $(PEERS)/gpytorch_svgp.py --data-dir "$$WINNOWGP_DATA" \
	    --dataset $$data --start kmeans --points $(SWEEP) --seed 0 \
	    --out benchmarks/results/regression/gpytorch-$$data.jsonl || exit 1; \
	done

# Runs every example of every page: about three minutes. The site can be read from site/index.html.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The archive and the wheel, each tried in an environment that holds nothing but what it asks for.
BUILD := .venv-build
BARE := .venv-bare
dist:
	rm -rf dist $(BARE)
	test -x $(BUILD)/bin/python || $(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/pip install --quiet --disable-pip-version-check "build>=1.2"
	$(BUILD)/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(BARE)/bin/python tests/minimal_install.py --clean
	$(BARE)/bin/winnow --version
	$(BARE)/bin/winnow demo --quiet -o $(BARE)/demo.png
	$(BARE)/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.tar.gz
	$(BARE)/bin/python tests/minimal_install.py --clean
	rm -rf $(BARE)
	ls -l dist

clean:
	rm -rf $(VENV) $(BUILD) $(BARE) dist site
