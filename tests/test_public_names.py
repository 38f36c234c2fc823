"""The names of the package `winnowgp` itself."""

from importlib import import_module

import pytest

import winnowgp


@pytest.mark.parametrize("name", winnowgp.__all__)
def test_public_name_is_listed_and_found(name: str) -> None:
    assert name in dir(winnowgp)
    assert getattr(winnowgp, name) is not None


def test_dir_lists_public_names_only() -> None:
    assert dir(winnowgp) == sorted(winnowgp.__all__)


@pytest.mark.parametrize("package", winnowgp._NAMES)
def test_top_level_name_is_public_in_its_package(package: str) -> None:
    """Type checkers find top-level names among the public names of the packages."""
    assert set(winnowgp._NAMES[package]) <= set(import_module(f"winnowgp.{package}").__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SparseGPRegresor'"):
        _ = winnowgp.SparseGPRegresor
