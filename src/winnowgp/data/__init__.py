"""Data in memory and out of core: sources, tables, scaling and the paper's data sets."""

from winnowgp.data.catalogue import hills, load_table
from winnowgp.data.dataset import Dataset, MaskedMatrix, Source
from winnowgp.data.encoding import TableEncoder
from winnowgp.data.out_of_core import ArraySource, BatchSource
from winnowgp.data.parquet import ParquetSource
from winnowgp.data.readers import read_blocks, read_table
from winnowgp.data.scaling import Standardiser, standardise
from winnowgp.data.sharding import shard
from winnowgp.data.tables import DataTable

__all__ = [
    "ArraySource",
    "BatchSource",
    "DataTable",
    "Dataset",
    "MaskedMatrix",
    "ParquetSource",
    "Source",
    "Standardiser",
    "TableEncoder",
    "hills",
    "load_table",
    "read_blocks",
    "read_table",
    "shard",
    "standardise",
]
