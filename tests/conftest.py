"""Shape checks in the test run: the signatures of the inner packages go through beartype.

The outer packages (estimators, integrations, cli) are left out: they validate what users pass and
raise their own errors. Their tests run whole fits, and run the inner packages without checks too,
as users do. A whole fit of an inner package is checked once for each code path; further ones are
marked `unchecked`.
"""

import gc
import os
from collections.abc import Iterator

# One thread for each test worker and each process that a test starts: several would wait for each
# other. The variable is read when the libraries are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

from helpers.forks import Forks
from helpers.typechecker import begin_test, check_first_calls

# Packages whose signatures are checked.
CHECKED_PACKAGES = [
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
# Modules of the GPyTorch integration that are not part of its public interface.
CHECKED_PACKAGES += [f"integrations.gpytorch.{module}" for module in ("distribution", "sites")]
# Folders of tests that run without checks.
UNCHECKED_TESTS = ["estimators", "report", "integrations", "cli", "tests"]
check_first_calls()
install_import_hook(
    [f"winnowgp.{name}" for name in CHECKED_PACKAGES], "helpers.typechecker.checked"
)
torch.set_num_threads(1)
# The same examples in every run, however long one takes.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and tests, which live until the end: it would
    traverse them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Switch the checks on or off and seed the global generators before any fixture runs, since
    fixtures fit models. Without the seeds, fits without `random_state` differ from run to run: one
    in some hundred ends with an alarm, which is an error here."""
    np.random.seed(0)  # noqa: NPY002 - what scikit-learn draws from without a seed
    torch.manual_seed(0)
    unchecked = item.get_closest_marker("unchecked") is not None
    # The GPyTorch integration has checked modules, and tests of them.
    checked = item.path.parent.name not in UNCHECKED_TESTS
    checked = checked or item.path.name.startswith("test_gpytorch_")
    begin_test(wanted=checked and not unchecked)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20210727)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes that run functions apart from the test process."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def quickly() -> Iterator[None]:
    """Shorten the fast schedule of estimators, for fits that need not be good."""
    # Imported here, because the import hook must come before the package.
    from helpers.short_fits import short_fits

    with short_fits():
        yield


@pytest.fixture(scope="module")
def quick_module() -> Iterator[None]:
    """As `quickly`, for fixtures of the module too; fits refit one model of a smaller size."""
    from helpers.short_fits import short_fits

    with short_fits(sizes=1):
        yield


@pytest.fixture
def one_size() -> Iterator[None]:
    """Let fits refit no models of smaller sizes and hold out two tenths of the rows, where a test
    does not look at either."""
    from helpers.short_fits import smaller_sizes, two_folds

    with smaller_sizes(0), two_folds():
        yield


@pytest.fixture
def short_shallow() -> Iterator[None]:
    """Let deep fits start from a shallow GP that is fitted shortly, where a test does not look at
    it."""
    from helpers.short_fits import short_shallow_starts

    with short_shallow_starts():
        yield


@pytest.fixture
def paper_data() -> None:
    """Skip the test unless the paper's data sets are available."""
    if "WINNOWGP_DATA" not in os.environ:
        pytest.skip("needs the paper's data: set WINNOWGP_DATA to the folder that has them")
