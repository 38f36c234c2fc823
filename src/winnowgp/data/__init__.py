"""Rows and targets: checked once, standardised, loaded by name, read some rows at a time."""

from winnowgp.data.catalogue import NamedTable, hills, load_table, table_names
from winnowgp.data.dataset import Dataset, MaskedMatrix
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.encoding import ColumnEncoding, TableEncoder
from winnowgp.data.out_of_core import ArraySource, BatchSource
from winnowgp.data.parquet import ParquetSource
from winnowgp.data.readers import column_blocks, read_table, regrouped
from winnowgp.data.sharding import ShardedSource, shared
from winnowgp.data.sources import RowBatches, Source, sampled_rows
from winnowgp.data.standardise import ColumnMoments, StandardisedSource, Standardiser, standardised
from winnowgp.data.tables import DataTable

__all__ = [
    "ArraySource",
    "BatchSource",
    "ColumnEncoding",
    "ColumnMoments",
    "DataTable",
    "Dataset",
    "MaskedMatrix",
    "NamedTable",
    "ParquetSource",
    "ProcessGroup",
    "RowBatches",
    "ShardedSource",
    "Source",
    "StandardisedSource",
    "Standardiser",
    "TableEncoder",
    "column_blocks",
    "hills",
    "load_table",
    "read_table",
    "regrouped",
    "sampled_rows",
    "shared",
    "standardised",
    "table_names",
]
