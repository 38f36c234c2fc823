# Commands for contributors; hosted CI and the pre-commit hooks call the same targets. Each target
# creates the virtual environment that it needs, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALL := install --quiet --disable-pip-version-check -c constraints.txt
# Bytecode is written when a module is imported: compiling every installed module takes longer than
# the installation.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test lint format types unit slow coverage hooks structure bench peers agreement noise-peers docs dist clean
.DEFAULT_GOAL := test

# Dependency groups need pip 25.1 or later; Python 3.11 comes with an older one.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip $(INSTALL) pip
	$(BIN)/python -m pip $(INSTALL) --no-compile -e . --group dev
	touch $@

demo: $(INSTALLED)
	$(BIN)/winnow demo

# Type checking takes one core and runs beside the tests.
test: lint
	$(MAKE) --no-print-directory -j 2 types unit

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(INSTALLED)
	$(BIN)/basedpyright --level error

unit: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# Coverage of src by the default tests, commands started by tests included.
coverage: $(INSTALLED)
	$(BIN)/coverage erase
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term --cov-report=xml

# Installs the git hooks of .pre-commit-config.yaml.
hooks: $(INSTALLED)
	$(BIN)/pre-commit install

# Size of the source tree, and the files that four typical fits pass through.
structure: $(INSTALLED)
	$(BIN)/python benchmarks/structure.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/selection.py
	$(BIN)/python benchmarks/classification.py
	$(BIN)/python benchmarks/deep.py step
	$(BIN)/python benchmarks/latent.py --seeds 0 1 2
	$(BIN)/python benchmarks/predict.py

# Six tables, our defaults and other libraries in virtual environments; a night on two cores. Fits
# that have a row are not repeated.
PEERS := benchmarks/peers
peers: $(INSTALLED) $(foreach peer,gpflow gpytorch gpboost trees,$(PEERS)/.venv-$(peer)/.installed)
	$(BIN)/python benchmarks/libraries.py
	$(BIN)/python benchmarks/libraries.py --page

# Bounds and predictions of GPflow, GPyTorch and GPJax at the parameters of ours; five minutes.
CASES := reproduced/agreement.npz
AGREEMENT := benchmarks/results/agreement
agreement: $(INSTALLED) $(foreach peer,gpflow gpytorch gpjax,$(PEERS)/.venv-$(peer)/.installed)
	$(BIN)/python benchmarks/agreement.py --cases $(CASES)
	for peer in gpflow gpytorch gpjax; do \
	  for dtype in float64 float32; do \
	    $(PEERS)/.venv-$$peer/bin/python $(PEERS)/$${peer}_agreement.py $(CASES) \
	      $(AGREEMENT)/$$peer-$$dtype.jsonl --dtype $$dtype || exit 1; \
	  done; \
	done
	$(BIN)/python benchmarks/agreement.py --summary

# GPBoost and CatBoost on tables whose noise varies; half an hour on two cores.
noise-peers: $(INSTALLED) $(PEERS)/.venv-gpboost/.installed $(PEERS)/.venv-catboost/.installed
	$(BIN)/python benchmarks/heteroscedastic.py --methods catboost
	$(BIN)/python benchmarks/heteroscedastic.py --methods catboost gpboost --rows 500

$(PEERS)/.venv-%/.installed: $(PEERS)/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Runs every example of every page, two pages at a time: about two minutes. The site can be read
# from site/index.html.
docs: $(INSTALLED)
	$(BIN)/python -m pip $(INSTALL) -e . --group docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -d site/.doctrees docs site

# Builds the archive and the wheel, and tries each in an environment that holds only its
# requirements.
BUILD := .venv-build
BARE := .venv-bare
dist:
	rm -rf dist $(BARE)
	test -x $(BUILD)/bin/python || $(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/python -m pip $(INSTALL) "build>=1.2"
	$(BUILD)/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip $(INSTALL) dist/*.whl
	$(BARE)/bin/python tests/minimal_install.py --clean
	$(BARE)/bin/winnow --version
	$(BARE)/bin/winnow demo --quiet -o $(BARE)/demo.png
	$(BARE)/bin/python -m pip $(INSTALL) --no-deps --force-reinstall dist/*.tar.gz
	$(BARE)/bin/python tests/minimal_install.py --clean
	rm -rf $(BARE)
	ls -l dist

clean:
	rm -rf $(VENV) $(BUILD) $(BARE) dist site coverage.xml .coverage .coverage.*
