"""Every argument of an estimator is documented once, also those of its base classes."""

import inspect
import re

import pytest

import winnowgp

ESTIMATORS = [
    "SparseGPRegressor",
    "SparseGPClassifier",
    "DeepGPRegressor",
    "DeepGPClassifier",
    "GPLVM",
    "MultiOutputGPRegressor",
    "MultiFidelityGPRegressor",
    "AdditiveGPRegressor",
]


def entries(docstring: str, title: str) -> list[str]:
    section = docstring.split(f"{title}:\n")[1].split("\n\n")[0]
    return re.findall(r"^    (\w+): ", section, re.MULTILINE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_docstring_documents_every_argument_once_in_order(name: str) -> None:
    estimator = getattr(winnowgp, name)
    documented = entries(estimator.__doc__, "Args")
    assert documented == list(inspect.signature(estimator).parameters)
    assert {"n_inducing_", "posterior_"} <= set(entries(estimator.__doc__, "Attributes"))


def test_docstring_of_own_argument_replaces_that_of_the_base() -> None:
    own, inherited = (getattr(winnowgp, name).__doc__ for name in ("GPLVM", "SparseGPRegressor"))
    assert "tolerance: largest ELBO gap relative to more inducing points" in own
    assert "tolerance: largest gap to the largest model" in inherited
