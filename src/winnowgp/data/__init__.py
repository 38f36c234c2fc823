"""Data in memory and out of core: sources, tables, scaling, and data sets by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from winnowgp.data.catalogue import example_table, hills
    from winnowgp.data.dataset import Dataset, MaskedMatrix, Source
    from winnowgp.data.out_of_core import ArraySource, BatchSource
    from winnowgp.data.parquet import ParquetSource
    from winnowgp.data.readers import read_blocks, read_table
    from winnowgp.data.scaling import Standardiser, standardise
    from winnowgp.data.sharding import shard
    from winnowgp.data.tables import DataTable

_MODULES = {
    "ArraySource": "out_of_core",
    "BatchSource": "out_of_core",
    "DataTable": "tables",
    "Dataset": "dataset",
    "MaskedMatrix": "dataset",
    "ParquetSource": "parquet",
    "Source": "dataset",
    "Standardiser": "scaling",
    "example_table": "catalogue",
    "hills": "catalogue",
    "read_blocks": "readers",
    "read_table": "readers",
    "shard": "sharding",
    "standardise": "scaling",
}

__all__ = [
    "ArraySource",
    "BatchSource",
    "DataTable",
    "Dataset",
    "MaskedMatrix",
    "ParquetSource",
    "Source",
    "Standardiser",
    "example_table",
    "hills",
    "read_blocks",
    "read_table",
    "shard",
    "standardise",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use: tables can be read without importing PyTorch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'winnowgp.data' has no attribute {name!r}")
    return getattr(import_module(f"winnowgp.data.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, whether they have been imported or not."""
    return sorted({*globals(), *__all__})
