"""Shapes are checked while tests run: every signature of the inner rooms goes through beartype.

The rim (estimators, integrations, cli) is left out: it meets whatever users bring, and must say
itself what is wrong with it. Its tests run whole fits, and run the inner rooms unchecked too, as
users do. Whole fits of the inner rooms are checked once for each path, and marked `unchecked`
beyond that.
"""

import os
from collections.abc import Iterator

# One thread for a worker of the tests, and for every process that a test starts: more of them
# would wait for each other in turns. Read when the libraries are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import install_import_hook

from helpers.forks import Forks
from helpers.typechecker import begin_test, check_first_calls

INNER_ROOMS = [
    "linalg",
    "data",
    "point_processes",
    "bounds",
    "gradients",
    "selection",
    "models",
    "training",
    "io",
    "plots",
    "experiments",
]
# The parts of the GPyTorch integration that users do not call.
INNER_ROOMS += [
    f"integrations.gpytorch.{module}" for module in ("distribution", "pruning", "sites")
]
RIM = ["estimators", "report", "integrations", "experiments", "cli", "tests"]
check_first_calls()
install_import_hook([f"winnowgp.{room}" for room in INNER_ROOMS], "helpers.typechecker.checked")
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, for those that fit a model."""
    unchecked = item.get_closest_marker("unchecked") is not None
    # GPyTorch's door has inner drawers, and tests of them.
    inner = item.path.parent.name not in RIM or item.path.name.startswith("test_gpytorch_")
    begin_test(wanted=inner and not unchecked)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20210727)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """For work in processes of its own."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def paper_data() -> None:
    """For tests that need the paper's data."""
    if "WINNOWGP_DATA" not in os.environ:
        pytest.skip("needs the paper's data: set WINNOWGP_DATA to the folder that holds it")
