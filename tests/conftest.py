"""Shapes are checked while tests run: every signature of the package goes through beartype."""

import os

import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook("winnowgp", "beartype.beartype")
torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20210727)


@pytest.fixture
def paper_data() -> None:
    """For tests that need the paper's data."""
    if "WINNOWGP_DATA" not in os.environ:
        pytest.skip("needs the paper's data: set WINNOWGP_DATA to the folder that holds it")
